"""What paged attention reaches: of memory's bandwidth in decodes, of arithmetic in prefill.

The cache is cold, as in a step of a model: each call takes the next of many layers, together
larger than any cache of the processor, and blocks lie in a random order, if nothing else is said:
the worst there is. What memory gives in pieces of that size is measured by a sum of them. The
reference in torch is timed beside each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.attention import paged_attention
from kernels.cpu.library import set_num_threads
from kernels.reference.attention import paged_attention as reference_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16  # SmolLM2-135M's
_COLD_BYTES: Final = 128 << 20
_SECONDS: Final = 0.4  # for each figure
_MIN_CALLS: Final = 5
_SUMMED_BLOCKS: Final = 64  # of a request of 1,000 tokens

Figures = dict[str, float]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
Call = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class Share:
    """Of a step: requests of one context, the last tokens of which are computed."""

    num_requests: int
    context: int  # tokens
    num_queries: int

    def __str__(self) -> str:
        kind = "decode" if self.num_queries == 1 else f"chunk of {self.num_queries}"
        return f"{self.num_requests} x {kind} at {self.context - self.num_queries}"


LONG_DECODES: Final = Share(32, 1000, 1)
STEPS: Final = (
    (Share(1, 128, 1),),
    (Share(8, 128, 1),),
    (Share(32, 128, 1),),
    (Share(1, 4000, 1),),
    (LONG_DECODES,),
    (Share(1, 128, 128),),
    (Share(1, 1128, 128),),
    (Share(1, 4128, 128),),
    (Share(1, 2064, 64), Share(8, 300, 1)),
)


def measure(num_threads: int) -> dict[str, Figures]:
    """By step and dtype of the cache: the time of a layer, in ms, GB/s and GFLOP/s."""
    set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    figures = {"memory, blocks in any order": {"read_gb_s": _read_bandwidth(torch.float16)}}
    for shares in STEPS:
        for dtype in (torch.float16, torch.float32):
            name = f"{' + '.join(map(str, shares))}, {str(dtype).removeprefix('torch.')}"
            figures[name] = _figures(_Step(shares), dtype)
    name = f"{LONG_DECODES}, float16, in order"
    figures[name] = _figures(_Step((LONG_DECODES,), in_order=True), torch.float16)
    return figures


def _read_bandwidth(dtype: torch.dtype) -> float:
    """Of the sum of many blocks' keys, or values."""
    block_bytes = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    num_blocks = _COLD_BYTES // block_bytes
    blocks = torch.ones(num_blocks, block_bytes // torch.float32.itemsize)
    order, starts = torch.randperm(num_blocks), torch.arange(0, num_blocks, _SUMMED_BLOCKS)
    seconds = _median_seconds(
        lambda blocks: F.embedding_bag(order, blocks, starts, mode="sum"), [blocks]
    )
    return blocks.nbytes / seconds * 1e-9


def _figures(step: _Step, dtype: torch.dtype) -> Figures:
    layers = step.layers(dtype)
    seconds = _median_seconds(step.call(paged_attention), layers)
    return {
        "ms": seconds * 1e3,
        "read_gb_s": layers[0].nbytes / seconds * 1e-9,
        "gflop_s": step.num_operations() / seconds * 1e-9,
        "reference_ms": _median_seconds(step.call(reference_attention), layers) * 1e3,
    }


class _Step:
    def __init__(self, shares: tuple[Share, ...], *, in_order: bool = False) -> None:
        """`in_order`: each request's blocks lie one behind the other."""
        self._requests = [share for share in shares for _ in range(share.num_requests)]
        num_blocks = [-(-request.context // BLOCK_SIZE) for request in self._requests]
        self._num_blocks = sum(num_blocks)
        order = torch.arange if in_order else torch.randperm
        blocks = torch.split(order(self._num_blocks, dtype=torch.int32), num_blocks)
        self._block_table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)

    def layers(self, dtype: torch.dtype) -> list[Tensor]:
        shape = (2, self._num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        layer = torch.randn(shape).to(dtype)
        return [layer.clone() for _ in range(-(-_COLD_BYTES // layer.nbytes) + 1)]

    def num_operations(self) -> int:
        """Two products for each query and key that it sees; an addition counts like a product."""
        pairs = sum(
            request.num_queries * (2 * request.context - request.num_queries + 1) // 2
            for request in self._requests
        )
        return 4 * pairs * NUM_HEADS * HEAD_DIM

    def call(self, attention: Attention) -> Call:
        counts = torch.tensor([0, *(request.num_queries for request in self._requests)])
        lengths = torch.tensor([request.context for request in self._requests], dtype=torch.int32)
        starts, scale = counts.cumsum(0).int(), HEAD_DIM**-0.5
        q = torch.randn(int(counts.sum()), NUM_HEADS, HEAD_DIM)
        return lambda layer: attention(q, layer, starts, lengths, self._block_table, scale, None)


def _median_seconds(call: Call, layers: list[Tensor]) -> float:
    call(layers[-1])
    taken: list[float] = []
    for index in count():
        start = time.perf_counter()
        call(layers[index % len(layers)])
        taken.append(time.perf_counter() - start)
        if len(taken) >= _MIN_CALLS and sum(taken) >= _SECONDS:
            break
    return median(taken)
