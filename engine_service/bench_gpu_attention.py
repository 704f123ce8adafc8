"""Steps of paged attention for `bench_gpu`: requests whose keys and values lie in random blocks.

Whatever a request does not see, the rest of its last block and a block of nobody's, is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.reference.attention import paged_attention

BLOCK_SIZE: Final = 16

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]


class Heads(NamedTuple):
    query: int
    kv: int
    size: int


class Share(NamedTuple):
    """Of a request: its last tokens are computed."""

    context: int  # tokens
    num_queries: int = 1


@dataclass(frozen=True, slots=True)
class AttentionStep:
    q_TND: Tensor
    cache_2BSKD: Tensor
    shares: tuple[Share, ...]
    query_start_loc_R1: Tensor
    seq_lens_R: Tensor
    block_table_RM: Tensor
    window: int | None = None  # tokens

    @classmethod
    def random(
        cls, shares: Sequence[Share], heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> AttentionStep:
        num_blocks = [-(-share.context // BLOCK_SIZE) for share in shares]
        blocks = torch.split(torch.randperm(sum(num_blocks), dtype=torch.int32), num_blocks)
        table_RM = torch.nn.utils.rnn.pad_sequence(
            list(blocks), batch_first=True, padding_value=sum(num_blocks)
        )
        shape = (2, sum(num_blocks) + 1, BLOCK_SIZE, heads.kv, heads.size)
        cache_2BSKD = torch.randn(shape, dtype=dtype, device=device)
        cache_2BSKD[:, -1] = torch.nan
        for share, own in zip(shares, blocks, strict=True):
            num_in_last = (share.context - 1) % BLOCK_SIZE + 1
            cache_2BSKD[:, int(own[-1]), num_in_last:] = torch.nan
        counts = [share.num_queries for share in shares]
        return cls(
            torch.randn(sum(counts), heads.query, heads.size, dtype=dtype, device=device),
            cache_2BSKD,
            tuple(shares),
            _starts(counts, device),
            _lengths([share.context for share in shares], device),
            table_RM.to(device),
        )

    def alone(self, request: int) -> AttentionStep:
        """The step of one of the requests, in the same cache."""
        start, end = self.query_start_loc_R1[request : request + 2].tolist()
        return replace(
            self,
            q_TND=self.q_TND[start:end],
            shares=self.shares[request : request + 1],
            query_start_loc_R1=_starts([end - start], self.q_TND.device),
            seq_lens_R=self.seq_lens_R[request : request + 1].clone(),
            block_table_RM=self.block_table_RM[request : request + 1],
        )

    def last_query(self) -> AttentionStep:
        """Of the only request, as a decode."""
        one_token = _starts([1], self.q_TND.device)
        return replace(self, q_TND=self.q_TND[-1:], query_start_loc_R1=one_token)

    def filled(self, num_rows: int) -> AttentionStep:
        """With so many rows more, of one token each that sees the block of nobody's."""
        device = self.q_TND.device
        counts = [share.num_queries for share in self.shares] + [1] * num_rows
        lengths = [share.context for share in self.shares] + [1] * num_rows
        spare = self.cache_2BSKD.shape[1] - 1
        rows_RM = self.block_table_RM.new_full((num_rows, self.block_table_RM.shape[1]), spare)
        return replace(
            self,
            q_TND=torch.cat((self.q_TND, self.q_TND[:1].expand(num_rows, -1, -1))),
            query_start_loc_R1=_starts(counts, device),
            seq_lens_R=_lengths(lengths, device),
            block_table_RM=torch.cat((self.block_table_RM, rows_RM)),
        )

    def attend(self, attention: Attention) -> Tensor:
        """[T, N, D]"""
        return attention(
            self.q_TND,
            self.cache_2BSKD,
            self.query_start_loc_R1,
            self.seq_lens_R,
            self.block_table_RM,
            self.q_TND.shape[2] ** -0.5,
            self.window,
        )

    def exact(self) -> Tensor:
        """[T, N, D] float64, by the reference."""
        wide = replace(self, q_TND=self.q_TND.double(), cache_2BSKD=self.cache_2BSKD.double())
        return wide.attend(paged_attention)

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that its requests have."""
        num_tokens = sum(share.context for share in self.shares)
        return num_tokens * self.cache_2BSKD[:, 0, 0].nbytes

    @property
    def operations(self) -> int:
        """Two products for each query and key that it sees; an addition counts like a product."""
        num_pairs = sum(
            share.num_queries * (2 * share.context - share.num_queries + 1) // 2
            for share in self.shares
        )
        return 4 * num_pairs * self.q_TND.shape[1] * self.q_TND.shape[2]


def _starts(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def _lengths(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)
