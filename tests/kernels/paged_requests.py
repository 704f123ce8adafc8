"""Requests whose keys and values lie in paged caches: the CPU kernels' and the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.attention import paged_attention
from kernels.cpu.rotary import rotary_cache_write
from kernels.reference.rotary import rotary_cache_write as reference_rotary_cache_write

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
Share = tuple[int, int, int]  # of a step: request, first position, end


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    size: int


@dataclass(frozen=True, slots=True)
class Projections:
    """A request's tokens [L, N + 2K, D]; q, k and v are views, as in the decoder."""

    qkv_LXD: Tensor
    heads: Heads

    @classmethod
    def random(cls, num_tokens: int, heads: Heads) -> Projections:
        return cls(torch.randn(num_tokens, heads.query + 2 * heads.kv, heads.size), heads)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split(self.qkv_LXD, [self.heads.query, self.heads.kv, self.heads.kv], dim=1)
        return q, k, v


class PagedRequests:
    """Writes the requests into blocks in a random order; all that is not written is NaN."""

    def __init__(
        self, requests: Sequence[Projections], block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self._requests = requests
        self._block_size = block_size
        heads = requests[0].heads
        counts = [-(-len(request.qkv_LXD) // block_size) for request in requests]
        blocks = torch.randperm(sum(counts) + 3, dtype=torch.int32)
        self.block_tables = torch.split(blocks[3:], counts)
        shape = (2, len(blocks), block_size, heads.kv, heads.size)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        self.reference_cache = self.cache.clone()
        for row, request in enumerate(requests):
            self._write(row, request)

    def _write(self, row: int, request: Projections) -> None:
        q, k, v = request.split()
        positions = torch.arange(len(k))
        blocks = self.block_tables[row].long()[positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        half = request.heads.size // 2
        unturned = torch.cat((torch.ones(len(k), half), torch.zeros(len(k), half)), dim=1)
        arguments = (q.clone(), k, v, unturned, positions, slots)
        rotary_cache_write(*arguments, self.cache)
        reference_rotary_cache_write(*arguments, self.reference_cache)

    def attend(self, shares: Sequence[Share], window: int | None = None) -> list[Tensor]:
        """[tokens, N, D] for each share, computed in one call."""
        return self._attend(paged_attention, self.cache, shares, window)

    def attend_with(
        self, attention: Attention, shares: Sequence[Share], window: int | None
    ) -> list[Tensor]:
        """Likewise, by the reference or another backend that has its layout of the cache."""
        return self._attend(attention, self.reference_cache, shares, window)

    def _attend(
        self, attention: Attention, cache: Tensor, shares: Sequence[Share], window: int | None
    ) -> list[Tensor]:
        counts = [end - start for _, start, end in shares]
        qkv = torch.cat([self._requests[row].qkv_LXD[start:end] for row, start, end in shares])
        q = Projections(qkv, self._requests[0].heads).split()[0]
        tables = [self.block_tables[row] for row, _, _ in shares]
        out = attention(
            q,
            cache,
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([end for _, _, end in shares], dtype=torch.int32),
            torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
            0.4 / self._requests[0].heads.size ** 0.5,
            window,
        )
        return list(torch.split(out, counts))
