"""Causal attention of a ragged batch over a paged KV cache, in C++.

Works on the blocks where they lie. A query's result depends on its position and its context alone:
sums go over partitions of 256 positions, from 0 on, and these are added in order.
"""

from __future__ import annotations

from ctypes import c_int
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_cache, check_contiguous, check_heads
from kernels.cpu.library import FLOAT, INT, POINTER, function

_ATTENTION: Final = (
    *(POINTER, INT) * 2,  # q, out and their strides
    *(POINTER,) * 3,  # query_start_loc, seq_lens, block_table
    *(INT,) * 6,  # T, R, M, N, K, D
    *(POINTER, POINTER, c_int, INT),  # the cache
    *(FLOAT, INT),  # scale, window
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
    its seq_lens[r]. A query at position p sees positions (p - sliding_window, p]. The cache is one
    that `rotary_cache_write` of this package wrote.
    """
    check_heads("q", q_TND)
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = kv_cache_2BSKD.shape[3]
    check_cache(kv_cache_2BSKD, num_heads, num_kv_heads, head_dim)
    check_contiguous("query_start_loc", query_start_loc_R1, torch.int32)
    check_contiguous("seq_lens", seq_lens_R, torch.int32)
    check_contiguous("block_table", block_table_RM, torch.int32)
    num_requests, blocks_per_row = block_table_RM.shape
    if query_start_loc_R1.shape != (num_requests + 1,) or seq_lens_R.shape != (num_requests,):
        raise ValueError(
            f"{len(query_start_loc_R1)} starts and {len(seq_lens_R)} lengths "
            f"for {num_requests} requests"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a window of {sliding_window} tokens")
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    keys = kv_cache_2BSKD.data_ptr()
    values = keys + kv_cache_2BSKD.stride(0) * kv_cache_2BSKD.itemsize
    attend = function("ft_paged_attention", _ATTENTION)
    attend(
        q_TND.data_ptr(),
        q_TND.stride(0),
        out_TND.data_ptr(),
        out_TND.stride(0),
        query_start_loc_R1.data_ptr(),
        seq_lens_R.data_ptr(),
        block_table_RM.data_ptr(),
        num_tokens,
        num_requests,
        blocks_per_row,
        num_heads,
        num_kv_heads,
        head_dim,
        keys,
        values,
        kv_cache_2BSKD.dtype == torch.float16,
        kv_cache_2BSKD.shape[2],
        scale,
        sliding_window or 0,
    )
    return out_TND
