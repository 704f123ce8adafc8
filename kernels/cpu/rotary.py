"""Rotary position embedding, and the write of a step's keys and values, in C++.

The cache's shape is the reference's, but within a block a head's numbers lie together and keys are
transposed: only these kernels read what they wrote.
"""

from __future__ import annotations

from ctypes import c_int
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_cache, check_contiguous, check_heads
from kernels.cpu.library import INT, POINTER, function

_ROTARY: Final = (
    *(POINTER, INT) * 3,  # q, k, v and their strides
    *(POINTER,) * 3,  # table, positions, slots
    *(INT,) * 4,  # T, N, K, D
    *(POINTER, POINTER, c_int, INT),  # the cache
)


def rotary_cache_write(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PD: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    kv_cache_2BSKD: Tensor,
) -> None:
    """Rotates q in place; writes rotated k, and v, into the slots of one layer's cache.

    Dimension i is paired with i + D/2. `cos_sin_PD` holds, by position, D/2 cosines and then D/2
    sines. A slot is block * block_size + offset; slots of one call are distinct.
    """
    for name, heads in (("q", q_TND), ("k", k_TKD), ("v", v_TKD)):
        check_heads(name, heads)
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    check_cache(kv_cache_2BSKD, num_heads, num_kv_heads, head_dim)
    check_contiguous("the table", cos_sin_PD, torch.float32)
    check_contiguous("positions", positions_T, torch.int64)
    check_contiguous("slots", slot_mapping_T, torch.int64)
    if k_TKD.shape != v_TKD.shape or k_TKD.shape != (num_tokens, num_kv_heads, head_dim):
        raise ValueError(f"k is {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}")
    if len(positions_T) != num_tokens or len(slot_mapping_T) != num_tokens:
        raise ValueError(f"{len(positions_T)} positions, {len(slot_mapping_T)} slots")
    if head_dim % 2 or cos_sin_PD.shape[1] != head_dim:
        raise ValueError(f"a table of {tuple(cos_sin_PD.shape)} for heads of {head_dim}")
    keys = kv_cache_2BSKD.data_ptr()
    values = keys + kv_cache_2BSKD.stride(0) * kv_cache_2BSKD.itemsize
    write = function("ft_rotary_cache_write", _ROTARY)
    write(
        q_TND.data_ptr(),
        q_TND.stride(0),
        k_TKD.data_ptr(),
        k_TKD.stride(0),
        v_TKD.data_ptr(),
        v_TKD.stride(0),
        cos_sin_PD.data_ptr(),
        positions_T.data_ptr(),
        slot_mapping_T.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        keys,
        values,
        kv_cache_2BSKD.dtype == torch.float16,
        kv_cache_2BSKD.shape[2],
    )
