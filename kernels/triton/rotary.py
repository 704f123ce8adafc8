"""Rotary position embedding, and the write of a step's keys and values, in Triton.

A program turns the heads of one token that share a KV head: its queries, its key, its value.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_cache, check_contiguous, check_rows


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
    sines. A slot is block * block_size + offset; slots of one call are distinct. Of a token whose
    slot is negative nothing is written. Heads may be strided; computed in float32.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    for name, heads in (("q", q_TND), ("k", k_TKD), ("v", v_TKD)):
        check_rows(name, heads)
    check_cache(kv_cache_2BSKD, num_heads, num_kv_heads, head_dim)
    check_contiguous("the table", cos_sin_PD)
    check_contiguous("positions", positions_T)
    check_contiguous("slots", slot_mapping_T)
    if k_TKD.shape != v_TKD.shape or k_TKD.shape != (num_tokens, num_kv_heads, head_dim):
        raise ValueError(f"k is {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}")
    if positions_T.shape != (num_tokens,) or slot_mapping_T.shape != (num_tokens,):
        raise ValueError(f"{len(positions_T)} positions, {len(slot_mapping_T)} slots")
    if head_dim % 2 or cos_sin_PD.shape[1] != head_dim:
        raise ValueError(f"a table of {tuple(cos_sin_PD.shape)} for heads of {head_dim}")
    group = num_heads // num_kv_heads
    _rotary_kernel[(num_tokens, num_kv_heads)](
        q_TND,
        k_TKD,
        v_TKD,
        cos_sin_PD,
        positions_T,
        slot_mapping_T,
        kv_cache_2BSKD[0],
        kv_cache_2BSKD[1],
        *q_TND.stride()[:2],
        *k_TKD.stride()[:2],
        *v_TKD.stride()[:2],
        GROUP=group,
        HEADS=triton.next_power_of_2(group),
        HALF=head_dim // 2,
        E=triton.next_power_of_2(head_dim // 2),
        num_warps=4 if group * head_dim > 512 else 1,
        enable_fp_fusion=False,
    )


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, E)
    is_pair = pairs < HALF
    cos_ptrs = cos_sin_ptr + position * (2 * HALF) + pairs
    cos = tl.load(cos_ptrs, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(cos_ptrs + HALF, mask=is_pair, other=0.0).to(tl.float32)

    heads = tl.arange(0, HEADS)
    is_query = (heads < GROUP)[:, None] & is_pair[None, :]
    q_heads = q_ptr + token * stride_q_token + (kv_head * GROUP + heads) * stride_q_head
    q_ptrs = q_heads[:, None] + pairs[None, :]
    low = tl.load(q_ptrs, mask=is_query, other=0.0).to(tl.float32)
    high = tl.load(q_ptrs + HALF, mask=is_query, other=0.0).to(tl.float32)
    tl.store(q_ptrs, low * cos[None, :] - high * sin[None, :], mask=is_query)
    tl.store(q_ptrs + HALF, high * cos[None, :] + low * sin[None, :], mask=is_query)

    if slot < 0:
        return
    k_ptrs = k_ptr + token * stride_k_token + kv_head * stride_k_head + pairs
    low = tl.load(k_ptrs, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(k_ptrs + HALF, mask=is_pair, other=0.0).to(tl.float32)
    offsets = (slot * tl.num_programs(1) + kv_head) * (2 * HALF) + pairs
    tl.store(k_cache_ptr + offsets, low * cos - high * sin, mask=is_pair)
    tl.store(k_cache_ptr + offsets + HALF, high * cos + low * sin, mask=is_pair)

    v_ptrs = v_ptr + token * stride_v_token + kv_head * stride_v_head + pairs
    tl.store(v_cache_ptr + offsets, tl.load(v_ptrs, mask=is_pair), mask=is_pair)
    tl.store(v_cache_ptr + offsets + HALF, tl.load(v_ptrs + HALF, mask=is_pair), mask=is_pair)
