"""The ragged batch of a step: who has which row, which position and which slot."""

from __future__ import annotations

from array import array

import torch

from engine_service.cpu_device import CpuDevice
from engine_service.input_batch import InputBatch, build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest

BLOCK_SIZE = 4


def share(
    prompt: list[int], num_computed: int, num_scheduled: int, blocks: list[int]
) -> ScheduledRequest:
    request = Request("r", 0, prompt, SamplingParams(), StoppingCriteria(max_tokens=9))
    return ScheduledRequest.of(request, num_computed, num_scheduled, array("i", blocks))


def build(*shares: ScheduledRequest) -> InputBatch:
    return build_input_batch(shares, BLOCK_SIZE, CpuDevice())


def test_chunks_and_single_tokens_side_by_side() -> None:
    shares = [
        share(list(range(100, 112)), 5, 3, [9, 2, 7]),  # stops short of its last token
        share(list(range(200, 210)), 9, 1, [4, 0, 8]),
        share([7, 8], 0, 2, [1]),
    ]
    batch = build(*shares)
    assert batch.input_ids_T.tolist() == [105, 106, 107, 209, 7, 8]
    assert batch.positions_T.tolist() == [5, 6, 7, 9, 0, 1]
    assert batch.slot_mapping_T.tolist() == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 8 * 4 + 1, 4, 5]
    assert batch.query_start_loc_R1.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens_R.tolist() == [8, 10, 2]
    assert batch.block_table_RM.tolist() == [[9, 2, 7], [4, 0, 8], [1, 0, 0]]
    assert batch.logits_indices.tolist() == [3, 5]


def test_dtypes_are_the_same_whether_anything_samples_or_not() -> None:
    for num_scheduled in (3, 12):
        batch = build(share(list(range(12)), 0, num_scheduled, [0, 1, 2]))
        assert len(batch.logits_indices) == (num_scheduled == 12)
        for ids in (
            batch.input_ids_T,
            batch.positions_T,
            batch.slot_mapping_T,
            batch.logits_indices,
        ):
            assert ids.dtype == torch.int64
        for counts in (batch.query_start_loc_R1, batch.seq_lens_R, batch.block_table_RM):
            assert counts.dtype == torch.int32
            assert counts.is_contiguous()


def test_the_batch_is_a_copy() -> None:
    one = share(list(range(8)), 0, 8, [3, 5])
    batch = build(one)
    one.request.append_output(77)
    assert isinstance(one.block_ids, array)
    one.block_ids.append(6)  # a table grows while the batch is in use
    one.block_ids[0] = 0
    assert batch.block_table_RM.tolist() == [[3, 5]]
    assert batch.input_ids_T.tolist() == list(range(8))
