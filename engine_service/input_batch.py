"""A step's share of every request, flattened into one ragged batch.

    request      |   a (chunk of 3)   | b (1) |   c (chunk of 2)   |
    input_ids    |  a5     a6     a7  |  b9   |   c0       c1      |     [T]
    positions    |   5      6      7  |   9   |    0        1      |     [T]
    query_start_loc  0                 3       4                   6     [R + 1]
    seq_lens         8                 10      2                         [R]

Tokens of one request are neighbours, in order. A request samples when its share reaches its last
token; `logits_indices` are the flat rows of those. All of it is written into one buffer, with what
sampling and logprobs need on the device, and goes there in one copy:

    | input_ids | positions | slots | logits_indices | ... | lengths | block table | sampling ... |
    |<-------------- places fixed by the capacity ----------------->|<-------- as needed -------->|

A token that a step under way yields is not known to the host: its id is taken from what that step
left on the device. A batch of single tokens can be filled up to a given number of requests, with
rows that compute what nobody needs in a block of nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_service.compute_device import ComputeDevice
from engine_service.request import RequestKey
from engine_service.scheduler_output import BlockCopy, ScheduledRequest
from kernels.array_places import ArrayPlaces, HostArray, PlacedArray

_EXTRA_BYTES_PER_REQUEST: Final = 1024  # for all but masks and long lists, which are rare
_TABLE: Final = "block_table"  # the last field, of which only what a step needs is sent
_TABLE_ITEM_BYTES: Final = 4
_Integers = NDArray[np.int64 | np.int32]
_HostFields = Mapping[str, _Integers]


@dataclass(frozen=True, slots=True)
class InputBatch:
    input_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slot_mapping_T: Tensor  # int64; block * block_size + offset, where the token's KV goes
    query_start_loc_R1: Tensor  # int32; each request's first flat row, then T
    seq_lens_R: Tensor  # int32; tokens of context, this step's included
    block_table_RM: Tensor  # int32; rows are padded with 0
    logits_indices: Tensor  # int64; flat rows that sample
    copy_sources: Tensor  # int64; blocks to be copied before the forward
    copy_destinations: Tensor  # int64
    extras: Sequence[Tensor]  # what else was to be sent


@dataclass(frozen=True, slots=True)
class LastTokens:
    """What the step before yields, by its rows that sample."""

    rows: Mapping[RequestKey, int]
    token_ids_R: Tensor  # int64, on the device


class InputBuffers:
    """Of all steps, each valid until the next is built."""

    def __init__(
        self,
        device: ComputeDevice,
        *,
        max_tokens: int,  # of a step
        max_requests: int,
        max_blocks: int,  # of a request
        block_size: int,
        spare_block: int,  # that no request gets
    ) -> None:
        self._block_size = block_size
        self._spare_block = spare_block
        fields = {
            "input_ids": PlacedArray((max_tokens,), np.int64),
            "positions": PlacedArray((max_tokens,), np.int64),
            "slot_mapping": PlacedArray((max_tokens,), np.int64),
            "logits_indices": PlacedArray((max_requests,), np.int64),
            "unknown_rows": PlacedArray((max_requests,), np.int64),
            "last_rows": PlacedArray((max_requests,), np.int64),
            "copy_sources": PlacedArray((max_requests,), np.int64),
            "copy_destinations": PlacedArray((max_requests,), np.int64),
            "query_start_loc": PlacedArray((max_requests + 1,), np.int32),
            "seq_lens": PlacedArray((max_requests,), np.int32),
            _TABLE: PlacedArray((max_requests * max_blocks,), np.int32),
        }
        places = ArrayPlaces.behind(0, list(fields.values()))
        self._places = {
            name: (place, field.dtype)
            for (name, field), place in zip(fields.items(), places.slices, strict=True)
        }
        self._upload = device.new_upload(places.num_bytes + max_requests * _EXTRA_BYTES_PER_REQUEST)
        # By buffer; larger ones come and go.
        self._host = {id(buffer): self._views(buffer) for buffer in self._upload.host_bytes}
        self._device = dict(zip(fields, places.views(self._upload.device_bytes), strict=True))

    def build(
        self,
        scheduled: Sequence[ScheduledRequest],
        copies: Sequence[BlockCopy] = (),
        last: LastTokens | None = None,
        fill_to: int | None = None,
        extras: Sequence[HostArray] = (),
    ) -> InputBatch:
        """Needs at least one scheduled request. `last`: where a share ends with a token that is not
        known. `fill_to`: so many requests, if each is one token that samples. `extras` are sent,
        too."""
        num_computed_R = np.array([share.num_computed_tokens for share in scheduled])
        num_scheduled_R = np.array([share.num_scheduled_tokens for share in scheduled])
        num_real, num_real_tokens = len(scheduled), int(num_scheduled_R.sum())
        num_rows = num_real if fill_to is None else fill_to
        num_tokens = num_real_tokens + num_rows - num_real
        num_blocks = max(len(share.block_ids) for share in scheduled)
        table_start = self._places[_TABLE][0].start
        table = slice(table_start, table_start + num_rows * num_blocks * _TABLE_ITEM_BYTES)
        extra_places = ArrayPlaces.behind(table.stop, extras)
        buffer = self._upload.begin(extra_places.num_bytes)
        host = self._host.get(id(buffer)) or self._views(buffer)

        starts_R1 = host["query_start_loc"][: num_rows + 1]
        starts_R1[0] = 0
        np.cumsum(num_scheduled_R, out=starts_R1[1 : num_real + 1])
        host["seq_lens"][:num_real] = num_computed_R + num_scheduled_R
        table_RM = self._write_block_table(host, scheduled, num_rows, num_blocks)
        rows_T = np.arange(num_real).repeat(num_scheduled_R)
        first_R = num_computed_R - starts_R1[:num_real]
        positions_T = np.arange(num_real_tokens) + first_R[rows_T]
        host["positions"][:num_real_tokens] = positions_T
        blocks_T, offsets_T = np.divmod(positions_T, self._block_size)
        slots_T = host["slot_mapping"][:num_real_tokens]
        slots_T[:] = offsets_T + table_RM[rows_T, blocks_T] * np.int64(self._block_size)
        sampling = [row for row, share in enumerate(scheduled) if share.samples]
        logits_indices = host["logits_indices"][: len(sampling)]
        logits_indices[:] = starts_R1[1:][sampling] - np.int64(1)
        num_unknown = self._write_ids(host, scheduled, starts_R1, last)
        if num_rows > num_real:
            self._fill(host, table_RM, slice(num_real, num_rows))
        host["copy_sources"][: len(copies)] = [copy.source for copy in copies]
        host["copy_destinations"][: len(copies)] = [copy.destination for copy in copies]
        for array, place in zip(extras, extra_places.slices, strict=True):
            array.write(buffer[place])

        sent = self._upload.send()
        on_device = self._device
        input_ids_T = on_device["input_ids"][:num_tokens]
        if last is not None and num_unknown:
            unknown_rows = on_device["unknown_rows"][:num_unknown]
            last_rows = on_device["last_rows"][:num_unknown]
            input_ids_T.index_copy_(0, unknown_rows, last.token_ids_R.index_select(0, last_rows))
        return InputBatch(
            input_ids_T=input_ids_T,
            positions_T=on_device["positions"][:num_tokens],
            slot_mapping_T=on_device["slot_mapping"][:num_tokens],
            query_start_loc_R1=on_device["query_start_loc"][: num_rows + 1],
            seq_lens_R=on_device["seq_lens"][:num_rows],
            block_table_RM=sent[table].view(torch.int32).view(table_RM.shape),
            logits_indices=on_device["logits_indices"][: len(sampling) + num_rows - num_real],
            copy_sources=on_device["copy_sources"][: len(copies)],
            copy_destinations=on_device["copy_destinations"][: len(copies)],
            extras=extra_places.views(sent),
        )

    def _views(self, buffer: NDArray[np.uint8]) -> _HostFields:
        return {name: buffer[place].view(dtype) for name, (place, dtype) in self._places.items()}

    def _write_block_table(
        self,
        host: _HostFields,
        scheduled: Sequence[ScheduledRequest],
        num_rows: int,
        num_blocks: int,
    ) -> _Integers:
        """[R, M], M being what the longest of them has."""
        table_RM = host[_TABLE][: num_rows * num_blocks].reshape(num_rows, num_blocks)
        table_RM[:] = 0
        for row_M, share in zip(table_RM, scheduled, strict=False):
            row_M[: len(share.block_ids)] = share.block_ids
        return table_RM

    def _write_ids(
        self,
        host: _HostFields,
        scheduled: Sequence[ScheduledRequest],
        starts_R1: _Integers,
        last: LastTokens | None,
    ) -> int:
        """Returns how many of them are not known."""
        input_ids: list[int] = []
        unknown_rows: list[int] = []
        last_rows: list[int] = []
        for share, end_row in zip(scheduled, starts_R1[1:].tolist(), strict=False):
            request, first = share.request, share.num_computed_tokens
            end = first + share.num_scheduled_tokens
            input_ids += request.token_ids[first:end]
            if end > request.num_tokens and last is not None:
                input_ids.append(0)
                unknown_rows.append(end_row - 1)
                last_rows.append(last.rows[request.key])
        host["input_ids"][: len(input_ids)] = input_ids
        host["unknown_rows"][: len(unknown_rows)] = unknown_rows
        host["last_rows"][: len(last_rows)] = last_rows
        return len(unknown_rows)

    def _fill(self, host: _HostFields, table_RM: _Integers, rows: slice) -> None:
        """Behind rows of one token each that sample, some of the same kind."""
        numbers = np.arange(rows.start, rows.stop)
        host["input_ids"][rows] = 0
        host["positions"][rows] = 0
        host["slot_mapping"][rows] = self._spare_block * self._block_size
        host["logits_indices"][rows] = numbers
        host["query_start_loc"][1:][rows] = numbers + 1
        host["seq_lens"][rows] = 1
        table_RM[rows, 0] = self._spare_block


def build_input_batch(
    scheduled: Sequence[ScheduledRequest], block_size: int, device: ComputeDevice
) -> InputBatch:
    """Of one step, in buffers of its own."""
    buffers = InputBuffers(
        device,
        max_tokens=sum(share.num_scheduled_tokens for share in scheduled),
        max_requests=len(scheduled),
        max_blocks=max(len(share.block_ids) for share in scheduled),
        block_size=block_size,
        spare_block=0,
    )
    return buffers.build(scheduled)
