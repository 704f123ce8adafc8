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

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_service.compute_device import ComputeDevice
from engine_service.request import RequestKey
from engine_service.scheduler_output import BlockCopy, ScheduledRequest
from kernels.array_places import ArrayPlaces, HostArray, PlacedArray

_EXTRA_BYTES_PER_REQUEST: Final = 1024  # for all but masks and long lists, which are rare
_TABLE: Final = "block_table"  # the last field, of which only what a step needs is sent
_TABLE_ITEM_BYTES: Final = 4
_DTYPES: Final[dict[str, type[np.generic]]] = {
    "q": np.int64,
    "i": np.int32,
}  # by the type codes of `array`
_KEPT_SIZES: Final = 256  # of steps, whose views of the device's memory need not be made again


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
    extras: Sequence[Tensor] = ()  # what else was to be sent


@dataclass(frozen=True, slots=True)
class LastTokens:
    """What the step before yields, by its rows that sample."""

    rows: Mapping[RequestKey, int]
    token_ids_R: Tensor  # int64, on the device


class _Size(NamedTuple):
    """What the shapes of a batch depend on."""

    num_tokens: int
    num_rows: int
    num_blocks: int  # of the request that has most
    num_logits: int
    num_copies: int


class _Numbers:
    """Of a step, field by field, as they go to the device."""

    def __init__(self) -> None:
        self.input_ids = array("q")
        self.positions = array("q")
        self.slot_mapping = array("q")
        self.logits_indices = array("q")
        self.unknown_rows = array("q")
        self.last_rows = array("q")
        self.copy_sources = array("q")
        self.copy_destinations = array("q")
        self.query_start_loc = array("i", (0,))
        self.seq_lens = array("i")
        self.block_table = array("i")


class InputBuffers:
    """Of all steps, each valid until the next is built.

    Python's own arrays are written, not numpy's: the most frequent step has a few numbers, and by
    then the model's weights have driven the code of a library from the processor's caches.
    """

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
        lengths = {
            "input_ids": max_tokens,
            "positions": max_tokens,
            "slot_mapping": max_tokens,
            "logits_indices": max_requests,
            "unknown_rows": max_requests,
            "last_rows": max_requests,
            "copy_sources": max_requests,
            "copy_destinations": max_requests,
            "query_start_loc": max_requests + 1,
            "seq_lens": max_requests,
            _TABLE: max_requests * max_blocks,
        }
        numbers = _Numbers()
        fields = {
            name: PlacedArray((length,), _DTYPES[getattr(numbers, name).typecode])
            for name, length in lengths.items()
        }
        places = ArrayPlaces.behind(0, list(fields.values()))
        self._starts = {
            name: place.start for name, place in zip(fields, places.slices, strict=True)
        }
        self._upload = device.new_upload(places.num_bytes + max_requests * _EXTRA_BYTES_PER_REQUEST)
        self._device = dict(zip(fields, places.views(self._upload.device_bytes), strict=True))
        self._batch_of = lru_cache(_KEPT_SIZES)(partial(_batch_of, self._device))

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
        num_blocks = max(len(share.block_ids) for share in scheduled)
        numbers = _Numbers()
        for share in scheduled:
            self._add_share(numbers, share, num_blocks, last)
        if fill_to is not None:
            self._fill(numbers, fill_to, num_blocks)
        for copy in copies:
            numbers.copy_sources.append(copy.source)
            numbers.copy_destinations.append(copy.destination)
        num_rows, num_unknown = len(numbers.seq_lens), len(numbers.unknown_rows)

        table_end = self._starts[_TABLE] + num_rows * num_blocks * _TABLE_ITEM_BYTES
        extra_places = ArrayPlaces.behind(table_end, extras)
        buffer = self._upload.begin(extra_places.num_bytes)
        self._write(buffer, numbers)
        for extra, place in zip(extras, extra_places.slices, strict=True):
            extra.write(buffer[place])
        sent = self._upload.send()

        if last is not None and num_unknown:
            unknown_rows = self._device["unknown_rows"][:num_unknown]
            last_rows = self._device["last_rows"][:num_unknown]
            last_ids = last.token_ids_R.index_select(0, last_rows)
            self._device["input_ids"].index_copy_(0, unknown_rows, last_ids)
        size = _Size(
            num_tokens=len(numbers.positions),
            num_rows=num_rows,
            num_blocks=num_blocks,
            num_logits=len(numbers.logits_indices),
            num_copies=len(copies),
        )
        batch = self._batch_of(size)
        return replace(batch, extras=extra_places.views(sent)) if extras else batch

    def _add_share(
        self, numbers: _Numbers, share: ScheduledRequest, num_blocks: int, last: LastTokens | None
    ) -> None:
        request, first, num_tokens, block_ids, samples, _ = share
        end = first + num_tokens
        if num_tokens == 1:
            numbers.positions.append(first)
            numbers.slot_mapping.append(self._slot(block_ids, first))
        else:
            positions_T = np.arange(first, end)
            numbers.positions.frombytes(positions_T.tobytes())
            slots_T = self._slot(np.asarray(block_ids, np.int64), positions_T)
            numbers.slot_mapping.frombytes(slots_T.tobytes())
        num_rows = len(numbers.positions)
        if end > request.num_tokens and last is not None:
            numbers.input_ids.fromlist(request.token_ids[first:])
            numbers.input_ids.append(0)  # until it is known
            numbers.unknown_rows.append(num_rows - 1)
            numbers.last_rows.append(last.rows[request.key])
        elif num_tokens == 1:
            numbers.input_ids.append(request.token_ids[first])
        else:
            numbers.input_ids.fromlist(request.token_ids[first:end])
        numbers.query_start_loc.append(num_rows)
        numbers.seq_lens.append(end)
        if samples:
            numbers.logits_indices.append(num_rows - 1)
        numbers.block_table.extend(block_ids)
        if len(block_ids) < num_blocks:
            numbers.block_table.extend(repeat(0, num_blocks - len(block_ids)))

    def _slot(self, block_ids: Any, positions: Any) -> Any:
        """Of a position, or of an array of them."""
        size = self._block_size
        return block_ids[positions // size] * size + positions % size

    def _fill(self, numbers: _Numbers, num_rows: int, num_blocks: int) -> None:
        """Behind rows of one token each that sample, some of the same kind."""
        for row in range(len(numbers.seq_lens), num_rows):
            numbers.input_ids.append(0)
            numbers.positions.append(0)
            numbers.slot_mapping.append(self._spare_block * self._block_size)
            numbers.logits_indices.append(row)
            numbers.query_start_loc.append(row + 1)
            numbers.seq_lens.append(1)
            numbers.block_table.append(self._spare_block)
            numbers.block_table.extend(repeat(0, num_blocks - 1))

    def _write(self, buffer: NDArray[np.uint8], numbers: _Numbers) -> None:
        to = buffer.data
        for name, start in self._starts.items():
            written: array[int] = getattr(numbers, name)
            if written:
                end = start + len(written) * written.itemsize
                to[start:end] = memoryview(written).cast("B")


def _batch_of(views: Mapping[str, Tensor], size: _Size) -> InputBatch:
    """What a step of that size leaves on the device. `views`: of all that fits, by field."""
    table = views[_TABLE][: size.num_rows * size.num_blocks]
    return InputBatch(
        input_ids_T=views["input_ids"][: size.num_tokens],
        positions_T=views["positions"][: size.num_tokens],
        slot_mapping_T=views["slot_mapping"][: size.num_tokens],
        query_start_loc_R1=views["query_start_loc"][: size.num_rows + 1],
        seq_lens_R=views["seq_lens"][: size.num_rows],
        block_table_RM=table.view(size.num_rows, size.num_blocks),
        logits_indices=views["logits_indices"][: size.num_logits],
        copy_sources=views["copy_sources"][: size.num_copies],
        copy_destinations=views["copy_destinations"][: size.num_copies],
    )


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
