"""Causal attention of a ragged batch over a paged KV cache, in Triton.

A step's requests of one query are computed split by split, all others tile by tile. A query's bits
depend on its position and its context alone: both forms have one height of tile and one size of
key block, and sum in one order (`attention_splits`). That order is the program's; that a GPU's
matrix instructions give a row the same bits wherever in the tile it lies is a property of theirs.

No size of a launch depends on what tensors hold, so a CUDA graph may be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from kernels.triton.attention_decode import add_splits_kernel, attend_splits_kernel
from kernels.triton.attention_splits import num_splits
from kernels.triton.attention_tiles import attend_tiles_kernel, num_tiles
from kernels.triton.checks import check_cache, check_contiguous, check_rows

# One warpgroup's matrix instruction on Hopper; a decode, whose time is that of reading the cache,
# does not notice the rows it leaves empty.
_TILE_ROWS: Final = 64
# Of float32 in heads of more than 128: what a program needs of shared memory every card has.
_SMALL_TILE_ROWS: Final = 16
_SPLIT_PROGRAMS: Final = 1024  # to keep a large GPU busy: several for each multiprocessor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sizes of a program; they follow from the model and its dtype, never from a step."""

    group: int  # query heads of a KV head
    queries: int  # of one KV head, in a tile
    rows: int
    dims: int  # with padding
    keys: int  # of a block
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, group: int, head_dim: int, dtype: torch.dtype) -> _Tile:
        dims = max(16, triton.next_power_of_2(head_dim))
        is_small = dims > 128 and dtype == torch.float32
        rows = max(_SMALL_TILE_ROWS if is_small else _TILE_ROWS, triton.next_power_of_2(group))
        is_large = dims > 128 or dtype == torch.float32
        return cls(
            group=group,
            queries=rows // group,
            rows=rows,
            dims=dims,
            keys=32 if is_large else 64,
            num_warps=8 if is_large or rows > _TILE_ROWS else 4,
            num_stages=2 if is_large else 3,
        )


def paged_attention(
    q_TND: Tensor,
    kv_cache_2BSKD: Tensor,
    query_start_loc_R1: Tensor,
    seq_lens_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Returns [T, N, D]. Query head n reads KV head n // (N / K).

    Request r owns rows query_start_loc[r] to query_start_loc[r + 1]; they are the last tokens of
    its seq_lens[r]. A query at position p sees positions (p - sliding_window, p].

    Every request has rows; so where there are as many as requests, each has one. A request of no
    length, as a captured graph has where there are fewer, reads nothing and gives zeros.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = kv_cache_2BSKD.shape[3]
    num_requests, blocks_per_row = block_table_RM.shape
    check_rows("q", q_TND)
    check_cache(kv_cache_2BSKD, num_heads, num_kv_heads, head_dim)
    check_rows("block_table", block_table_RM)
    check_contiguous("query_start_loc", query_start_loc_R1)
    check_contiguous("seq_lens", seq_lens_R)
    if query_start_loc_R1.shape != (num_requests + 1,) or seq_lens_R.shape != (num_requests,):
        raise ValueError(
            f"{len(query_start_loc_R1)} starts and {len(seq_lens_R)} lengths "
            f"for {num_requests} requests"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a window of {sliding_window} tokens")
    step = _Step(
        q_TND,
        kv_cache_2BSKD,
        query_start_loc_R1,
        seq_lens_R,
        block_table_RM,
        scale * math.log2(math.e),
        sliding_window or 0,
        _Tile.of(num_heads // num_kv_heads, head_dim, q_TND.dtype),
    )
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    if num_requests > 1 or num_tokens == 1:
        step.attend_decodes(out_TND, blocks_per_row * kv_cache_2BSKD.shape[2])
    if num_tokens != num_requests:
        step.attend_chunks(out_TND)
    return out_TND


@dataclass(frozen=True, slots=True)
class _Step:
    """What both forms are launched with."""

    q_TND: Tensor
    kv_cache_2BSKD: Tensor
    query_start_loc_R1: Tensor
    seq_lens_R: Tensor
    block_table_RM: Tensor
    log2_scale: float  # of scores that are powers of 2
    window: int  # 0: none
    tile: _Tile

    def attend_decodes(self, out_TND: Tensor, longest: int) -> None:
        """The requests of one query; none has a context of more than `longest` tokens."""
        num_requests = self.block_table_RM.shape[0]
        num_heads, head_dim = self.q_TND.shape[1:]
        num_kv_heads = self.kv_cache_2BSKD.shape[3]
        splits = num_splits(longest)
        sharing = triton.cdiv(_SPLIT_PROGRAMS, max(1, num_requests * num_kv_heads))
        largest_RNC = self._floats(num_requests, num_heads, splits)
        totals_RNC = torch.empty_like(largest_RNC)
        sums_RNCD = self._floats(num_requests, num_heads, splits, head_dim)
        attend_splits_kernel[(num_requests, num_kv_heads, min(splits, sharing))](
            self.q_TND,
            largest_RNC,
            totals_RNC,
            sums_RNCD,
            *self._context(),
            self.block_table_RM.stride(0),
            splits,
            *self._strides(),
            self.log2_scale,
            **self._sizes(),
        )
        add_splits_kernel[(num_requests, num_heads)](
            largest_RNC,
            totals_RNC,
            sums_RNCD,
            out_TND,
            self.query_start_loc_R1,
            self.seq_lens_R,
            splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            D=self.tile.dims,
            WINDOW=self.window,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def attend_chunks(self, out_TND: Tensor) -> None:
        """The requests of several queries."""
        num_requests = self.block_table_RM.shape[0]
        tiles = num_tiles(self.q_TND.shape[0], num_requests, self.tile.queries)
        attend_tiles_kernel[(tiles, self.kv_cache_2BSKD.shape[3])](
            self.q_TND,
            out_TND,
            *self._context(),
            num_requests,
            self.block_table_RM.stride(0),
            *self._strides(),
            self.log2_scale,
            QUERIES=self.tile.queries,
            **self._sizes(),
        )

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.q_TND.device)

    def _context(self) -> tuple[Tensor, ...]:
        keys_BSKD, values_BSKD = self.kv_cache_2BSKD.unbind(0)
        tables = (self.query_start_loc_R1, self.seq_lens_R, self.block_table_RM)
        return (keys_BSKD, values_BSKD, *tables)

    def _strides(self) -> tuple[int, ...]:
        """Of tokens and heads of q, and of blocks and slots of the cache."""
        return (*self.q_TND.stride()[:2], *self.kv_cache_2BSKD.stride()[1:3])

    def _sizes(self) -> dict[str, int]:
        num_heads, head_dim = self.q_TND.shape[1:]
        return {
            "NUM_HEADS": num_heads,
            "GROUP": self.tile.group,
            "HEAD_DIM": head_dim,
            "ROWS": self.tile.rows,
            "D": self.tile.dims,
            "KEYS": self.tile.keys,
            "BLOCK_SIZE": self.kv_cache_2BSKD.shape[2],
            "WINDOW": self.window,
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.num_stages,
            "enable_fp_fusion": False,
        }
