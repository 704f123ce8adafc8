"""The sums of paged attention: by splits at absolute positions, added in one order.

    keys     |<- 256 ->|<- 256 ->|  ...  |<- 256 ->|<--- 1,024 --->|<--- 1,024 --->|  ...
    split         0         1                 31          32              33

A split is summed from its first key to its last in blocks, with the largest score so far as the
base of all powers. The splits' sums are then added up from the first to the last in the same way.
What a query sees nothing of, a block or a split, adds exact zeros and leaves the base as it is. So
it does not matter which blocks a tile's other queries need, nor who adds the splits up.

Short splits give a short context to several programs; long ones bound the sums to be kept of a
long context.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kernels.triton.product import dot

_SHORT_KEYS: Final = 256
_LONG_KEYS: Final = 1024
_NUM_SHORT: Final = 32

_SHORT = tl.constexpr(_SHORT_KEYS)
_LONG = tl.constexpr(_LONG_KEYS)
_SHORTS = tl.constexpr(_NUM_SHORT)
_SHORTS_END = tl.constexpr(_NUM_SHORT * _SHORT_KEYS)


def num_splits(num_keys: int) -> int:
    """Of a context of that many."""
    num_beyond = max(0, num_keys - _NUM_SHORT * _SHORT_KEYS)
    return min(_NUM_SHORT, -(-num_keys // _SHORT_KEYS)) + -(-num_beyond // _LONG_KEYS)


@triton.jit
def split_of(position):
    """Of a position that is not negative."""
    num_beyond = tl.maximum(position - _SHORTS_END, 0)
    return tl.minimum(position // _SHORT, _SHORTS) + num_beyond // _LONG


@triton.jit
def split_start(split):
    """The first key; of the next split, the end of this one."""
    shorts = tl.minimum(split, _SHORTS)
    return shorts * _SHORT + (split - shorts) * _LONG


@triton.jit
def share_of(request, query_start_loc_ptr, seq_lens_ptr):
    """A request's first token in the step, how many it has there, and where its context ends."""
    start = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - start
    return start, num_queries, tl.load(seq_lens_ptr + request)


@triton.jit
def lowest_seen(position, WINDOW: tl.constexpr):
    """The first position that one sees. WINDOW 0 is none."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(position - WINDOW + 1, 0)
    return lowest


@triton.jit
def attend_split(
    q,
    positions,
    split,
    first_seen,
    end_seen,
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
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The largest score [ROWS], sum of weights [ROWS] and of weighted values [ROWS, D], float32.

    Of a split's keys from the block of KEYS in which `first_seen` lies to `end_seen`; none from
    `context_end` on is read. q is [ROWS, D], `positions` are its rows' (-1 sees nothing).
    """
    ROWS: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    first_key = tl.maximum(split_start(split), first_seen // KEYS * KEYS)
    end_key = tl.minimum(split_start(split + 1), end_seen)
    k_head_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_cache_ptr + kv_head * HEAD_DIM
    blocks_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    dims = tl.arange(0, D)
    is_dim = dims < HEAD_DIM
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for block_start in range(first_key, end_key, KEYS):
        keys = block_start + tl.arange(0, KEYS)
        is_key = keys < context_end
        blocks = tl.load(blocks_ptr + keys // BLOCK_SIZE, mask=is_key, other=0)
        offsets = blocks.to(tl.int64) * stride_block + keys % BLOCK_SIZE * stride_slot

        k_ptrs = k_head_ptr + offsets[None, :] + dims[:, None]
        k = tl.load(k_ptrs, mask=is_key[None, :] & is_dim[:, None], other=0.0).to(q.dtype)
        scores = dot(q, k, tl.zeros([ROWS, KEYS], tl.float32)) * log2_scale
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, axis=1))
        base = _finite(larger)
        weights = tl.exp2(scores - base[:, None])
        shrinking = tl.exp2(largest - base)
        total = total * shrinking + tl.sum(weights, axis=1)
        v_ptrs = v_head_ptr + offsets[:, None] + dims[None, :]
        v = tl.load(v_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0).to(q.dtype)
        sums = dot(weights.to(q.dtype), v, sums * shrinking[:, None])
        largest = larger
    return largest, total, sums


@triton.jit
def add_split(largest, total, sums, split_largest, split_total, split_sums):
    """What `attend_split` gives of all keys up to here, and then of the next split as well."""
    larger = tl.maximum(largest, split_largest)
    base = _finite(larger)
    shrinking = tl.exp2(largest - base)
    split_shrinking = tl.exp2(split_largest - base)
    total = total * shrinking + split_total * split_shrinking
    sums = sums * shrinking[:, None] + split_sums * split_shrinking[:, None]
    return larger, total, sums


@triton.jit
def mean_value(total, sums):
    """[ROWS, D]; zeros for rows that saw nothing."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _finite(largest):
    """Scores less this are what to raise 2 to: 0 where nothing was seen, whose scores are -inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)
