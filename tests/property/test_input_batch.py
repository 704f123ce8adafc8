"""One batch after another in the same buffers: each is what its shares say, token by token."""

from __future__ import annotations

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_service.cpu_device import CpuDevice
from engine_service.input_batch import InputBuffers, LastTokens
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.scheduler_output import BlockCopy, ScheduledRequest

MAX_TOKENS, MAX_REQUESTS, MAX_BLOCKS = 60, 6, 8
LAST_IDS = torch.arange(900, 900 + MAX_REQUESTS)


@st.composite
def shares(draw: st.DrawFn, block_size: int) -> ScheduledRequest:
    num_tokens = draw(st.integers(1, MAX_TOKENS // MAX_REQUESTS))
    first = draw(st.integers(0, num_tokens - 1))
    is_ahead = draw(st.booleans())  # its last token is what the step before yields
    end = num_tokens if is_ahead else draw(st.integers(first + 1, num_tokens))
    num_blocks = draw(st.integers(-(-num_tokens // block_size), MAX_BLOCKS * 2))
    ids = draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))
    request = Request("r", 0, ids, SamplingParams(), StoppingCriteria(max_tokens=9))
    if is_ahead:
        del request.token_ids[-1]
        request.num_pending_outputs = 1
    blocks = draw(st.lists(st.integers(0, 500), min_size=num_blocks, max_size=num_blocks))
    return ScheduledRequest.of(request, first, end - first, array("i", blocks))


@given(st.data(), st.integers(1, 5))
def test_batches_in_the_same_buffers(data: st.DataObject, block_size: int) -> None:
    max_blocks = max(MAX_BLOCKS * 2, -(-MAX_TOKENS // block_size))
    spare_block = 600
    buffers = InputBuffers(
        CpuDevice(),
        max_tokens=MAX_TOKENS,
        max_requests=MAX_REQUESTS,
        max_blocks=max_blocks,
        block_size=block_size,
        spare_block=spare_block,
    )
    for _ in range(3):
        step = data.draw(st.lists(shares(block_size), min_size=1, max_size=MAX_REQUESTS))
        for row, share in enumerate(step):
            share.request.request_id = f"r{row}"
        copies = data.draw(st.lists(st.builds(BlockCopy, st.integers(0, 9), st.integers(0, 9))))
        copies = copies[:MAX_REQUESTS]
        single = all(share.num_scheduled_tokens == 1 and share.samples for share in step)
        fill_to = data.draw(st.integers(len(step), MAX_REQUESTS)) if single else None
        rows = {share.request.key: len(step) - 1 - row for row, share in enumerate(step)}
        batch = buffers.build(step, copies, LastTokens(rows, LAST_IDS), fill_to)

        ids, positions, slots, starts, samples = [], [], [], [0], []
        for share in step:
            for place in range(share.num_scheduled_tokens):
                position = share.num_computed_tokens + place
                is_known = position < share.request.num_tokens
                last_id = int(LAST_IDS[rows[share.request.key]])
                ids.append(share.request.token_ids[position] if is_known else last_id)
                positions.append(position)
                block = share.block_ids[position // block_size]
                slots.append(block * block_size + position % block_size)
            starts.append(len(ids))
            samples += [len(ids) - 1] if share.samples else []
        lengths = [s.num_computed_tokens + s.num_scheduled_tokens for s in step]
        width = max(len(share.block_ids) for share in step)
        table = [[*share.block_ids, *[0] * (width - len(share.block_ids))] for share in step]
        for _ in range((fill_to or 0) - len(step)):
            starts.append(starts[-1] + 1)
            samples.append(len(ids))
            ids.append(0)
            positions.append(0)
            slots.append(spare_block * block_size)
            lengths.append(1)
            table.append([spare_block, *[0] * (width - 1)])
        assert batch.input_ids_T.tolist() == ids
        assert batch.positions_T.tolist() == positions
        assert batch.slot_mapping_T.tolist() == slots
        assert batch.query_start_loc_R1.tolist() == starts
        assert batch.seq_lens_R.tolist() == lengths
        assert batch.block_table_RM.tolist() == table
        assert batch.logits_indices.tolist() == samples
        assert batch.copy_sources.tolist() == [copy.source for copy in copies]
        assert batch.copy_destinations.tolist() == [copy.destination for copy in copies]
