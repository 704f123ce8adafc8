"""Attention of requests with one query: the splits of a context in several programs, then added up.

    request, KV head   |  split 0  |  split 1  |  split 2  |  split 3  |
    programs                 a           b           a           b

How many programs share a context depends on how many contexts there are; what a split gives, and
the order in which the splits are added, does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_splits import (
    add_split,
    attend_split,
    lowest_seen,
    mean_value,
    share_of,
    split_of,
)


@triton.jit(do_not_specialize=["stride_table", "num_splits"])
def attend_splits_kernel(
    q_ptr,
    largest_ptr,
    totals_ptr,
    sums_ptr,
    k_cache_ptr,
    v_cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    stride_table,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    log2_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Writes what `attend_split` gives of each split that the query sees."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    start, num_queries, context_end = share_of(request, query_start_loc_ptr, seq_lens_ptr)
    if num_queries != 1 or context_end == 0:
        return
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    positions = tl.where(is_row, context_end - 1, -1)
    q_rows = q_ptr + start.to(tl.int64) * stride_q_token + heads * stride_q_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=is_number, other=0.0)

    first_seen = lowest_seen(context_end - 1, WINDOW)
    first_split = split_of(first_seen) + tl.program_id(2)
    for split in range(first_split, split_of(context_end - 1) + 1, tl.num_programs(2)):
        largest, total, sums = attend_split(
            q,
            positions,
            split,
            first_seen,
            context_end,
            context_end,
            request,
            kv_head,
            k_cache_ptr,
            v_cache_ptr,
            block_table_ptr,
            stride_table,
            stride_block,
            stride_slot,
            log2_scale,
            HEAD_DIM,
            KEYS,
            BLOCK_SIZE,
            WINDOW,
        )
        parts = (request.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(largest_ptr + parts, largest, mask=is_row)
        tl.store(totals_ptr + parts, total, mask=is_row)
        sums_ptrs = sums_ptr + parts[:, None] * HEAD_DIM + dims[None, :]
        tl.store(sums_ptrs, sums, mask=is_number)


@triton.jit(do_not_specialize=["num_splits"])
def add_splits_kernel(
    largest_ptr,
    totals_ptr,
    sums_ptr,
    out_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Writes a query head's result; zeros for a request without a context."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    start, num_queries, context_end = share_of(request, query_start_loc_ptr, seq_lens_ptr)
    if num_queries != 1:
        return
    dims = tl.arange(0, D)
    is_dim = (dims < HEAD_DIM)[None, :]
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, D], tl.float32)
    first_split = split_of(lowest_seen(context_end - 1, WINDOW))
    for split in range(first_split, _end_split(context_end)):
        part = (request.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        parts = part + tl.arange(0, 1)
        sums_ptrs = sums_ptr + parts[:, None] * HEAD_DIM + dims[None, :]
        largest, total, sums = add_split(
            largest,
            total,
            sums,
            tl.load(largest_ptr + parts),
            tl.load(totals_ptr + parts),
            tl.load(sums_ptrs, mask=is_dim, other=0.0),
        )
    out_ptrs = out_ptr + (start.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, mean_value(total, sums), mask=is_dim)


@triton.jit
def _end_split(context_end):
    return tl.where(context_end > 0, split_of(tl.maximum(context_end - 1, 0)) + 1, 0)
