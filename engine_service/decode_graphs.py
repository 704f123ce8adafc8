"""Steps in which every request has one token, captured by their size and replayed.

    requests    1, 2, 4, 8, 16, 24, 32, ... up to the most that run at once; a step is filled up
    context     the widest block table: 64 blocks, four times as many, ... up to the longest

Those of the smallest width are captured at the start, and the largest of the widest, which leaves
memory for all; others when they first come, which takes as long as some steps. What changes from
step to step is in fixed places: the buffers that `InputBuffers` writes, and a block table of the
largest width, into which the step's own is copied. All leave their logits in one place.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from engine_service.compute_device import ComputeDevice
from engine_service.input_batch import InputBatch
from engine_service.models.decoder import StepDecoder

_SMALLEST_WIDTH: Final = 64  # blocks
_WIDTH_FACTOR: Final = 4


def graph_sizes(largest: int) -> list[int]:
    """Numbers of requests, ascending."""
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


def graph_widths(largest: int) -> list[int]:
    """Numbers of blocks, ascending."""
    widths = [largest]
    width = _SMALLEST_WIDTH
    while width < largest:
        widths.append(width)
        width *= _WIDTH_FACTOR
    return sorted(widths)


class DecodeGraphs:
    def __init__(
        self,
        device: ComputeDevice,
        decoder: StepDecoder,
        kv_cache_L2BSKD: Tensor,
        *,
        max_requests: int,
        max_blocks: int,  # of a request
        vocab_size: int,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._kv_cache_L2BSKD = kv_cache_L2BSKD
        self.sizes = graph_sizes(max_requests)
        self._widths = graph_widths(max_blocks)
        on_device = device.torch_device
        self._table_RM = torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=on_device)
        self._logits_RV = torch.zeros(max_requests, vocab_size, device=on_device)
        self._graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def size_for(self, num_requests: int) -> int:
        """How many requests a step of so many is filled up to."""
        return self.sizes[bisect.bisect_left(self.sizes, num_requests)]

    def logits(self, batch: InputBatch) -> Tensor:
        """Of each row of a batch of one of the sizes, [R, V]; valid until the next call."""
        num_rows, num_blocks = batch.block_table_RM.shape
        width = self._widths[bisect.bisect_left(self._widths, num_blocks)]
        self._table_RM[:num_rows, :num_blocks].copy_(batch.block_table_RM)
        replay = self._graphs.get((num_rows, width))
        if replay is None:
            fixed = replace(batch, block_table_RM=self._table_RM[:num_rows, :width])
            replay = self._device.capture(lambda: self._compute(fixed))
            self._graphs[num_rows, width] = replay
        return replay()

    def _compute(self, batch: InputBatch) -> Tensor:
        hidden_RH = self._decoder.forward(batch, self._kv_cache_L2BSKD)
        return self._logits_RV[: len(hidden_RH)].copy_(self._decoder.logits(hidden_RH))
