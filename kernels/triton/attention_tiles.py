"""Attention of chunks: a program for each tile of a request's queries and KV head.

    request's queries   |  0  |  1  |  2  |  3  |  4  |        query heads of a KV head: a, b, c
    tile's rows         0a 0b 0c 1a 1b 1c ...                  all that fit whole; the others empty

Requests of one query are left to `attention_decode`.
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


def num_tiles(num_tokens: int, num_requests: int, queries_per_tile: int) -> int:
    """At most, however the tokens are shared out."""
    return num_tokens // queries_per_tile + num_requests


@triton.jit(do_not_specialize=["num_requests", "stride_table"])
def attend_tiles_kernel(
    q_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    num_requests,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    log2_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _request_of(tile, query_start_loc_ptr, num_requests, QUERIES)
    start, num_queries, context_end = share_of(request, query_start_loc_ptr, seq_lens_ptr)
    first_query = (tile - _first_tile(request, start, QUERIES)) * QUERIES
    if num_queries == 1 or first_query >= num_queries:
        return
    first_position = context_end - num_queries + first_query

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < num_queries)
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    positions = tl.where(is_row, first_position + rows // GROUP, -1)
    tokens = (start + queries).to(tl.int64)
    q_rows = q_ptr + tokens * stride_q_token + heads * stride_q_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=is_number, other=0.0)

    tile_end = tl.minimum(first_position + QUERIES, context_end)
    first_seen = lowest_seen(first_position, WINDOW)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for split in range(split_of(first_seen), split_of(tl.maximum(tile_end - 1, 0)) + 1):
        split_largest, split_total, split_sums = attend_split(
            q,
            positions,
            split,
            first_seen,
            tile_end,
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
        largest, total, sums = add_split(
            largest, total, sums, split_largest, split_total, split_sums
        )
    out_rows = out_ptr + (tokens * NUM_HEADS + heads) * HEAD_DIM
    tl.store(out_rows[:, None] + dims[None, :], mean_value(total, sums), mask=is_number)


@triton.jit
def _first_tile(request, start, QUERIES: tl.constexpr):
    """Of the tiles that are a request's, which are never fewer than it needs."""
    return start // QUERIES + request


@triton.jit
def _request_of(tile, query_start_loc_ptr, num_requests, QUERIES: tl.constexpr):
    """The last request whose first tile is not behind `tile`."""
    found = 0
    end = num_requests
    while end - found > 1:
        middle = (found + end) // 2
        start = tl.load(query_start_loc_ptr + middle)
        if _first_tile(middle, start, QUERIES) <= tile:
            found = middle
        else:
            end = middle
    return found
