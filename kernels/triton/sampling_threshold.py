"""Where a filter cuts a row: by bins of counted tokens, then by halving, without a sort.

    fall below the largest   0 ------------------------------------------------ span
    bins, counted once       |  0  |  1  | ... | first |  ..  | last | ... | 126 |    weightless
    amount                   |<-- all above -->|<- undecided ->|                  |    127    |

Amounts are tokens or weights. The bins are as wide as the row needs, so that few tokens share the
one in which an amount is reached: those are written out side by side and their interval is halved
until one logit is left. Where too many share it, the whole row is read at each halving instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_rows import (
    LARGEST_FLOAT,
    UNITS_OF_LARGEST,
    falls,
    load_tile,
    order_of,
    weigh,
)

NUM_BINS = tl.constexpr(128)
WEIGHTLESS = tl.constexpr(127)  # the bin of what weighs nothing
NUM_CANDIDATES = tl.constexpr(4096)  # that are written out, at most
# e^fall of a bin's edge may be off by so much of what `weigh` gives.
_ROUNDING = tl.constexpr(1e-4)


@triton.jit
def bins_per_fall(span):
    """For bins over falls of 0 to `span`, which may be 0 or infinite."""
    return (WEIGHTLESS - 1) / tl.minimum(tl.maximum(span, 1e-30), LARGEST_FLOAT)


@triton.jit
def bins_of(logits, weights, largest, bins_a_fall):
    bins = tl.minimum(falls(logits, largest) * bins_a_fall, WEIGHTLESS - 1).to(tl.int32)
    return tl.where(weights > 0, bins, WEIGHTLESS)


@triton.jit
def count_bins(
    row_V,
    vocab_size,
    largest,
    scale,
    bins_a_fall,
    TILE: tl.constexpr,
):
    """(tokens of each bin but the weightless, what the row weighs)."""
    counts = tl.zeros([NUM_BINS], tl.int32)
    weight_T = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        logits = load_tile(row_V, start, vocab_size, TILE)
        weights = weigh(logits, largest, scale)
        counts += tl.histogram(bins_of(logits, weights, largest, bins_a_fall), NUM_BINS)
        weight_T += weights
    counts = tl.where(tl.arange(0, NUM_BINS) < WEIGHTLESS, counts, 0)
    return counts, tl.sum(weight_T, axis=0)


@triton.jit
def bin_of_rank(counts, rank):
    """The bin of the rank-th largest; WEIGHTLESS or more where there is none."""
    return tl.sum((tl.cumsum(counts, axis=0) < rank).to(tl.int32), axis=0)


@triton.jit
def bins_of_share(counts, goal, weight, scale, bins_a_fall):
    """(first, last) of the bins in one of which the weights from the largest on reach the goal.

    What a bin weighs is known from its edges, more or less. `weight`, the sum of all, is exact: so
    what comes up to a bin is bounded from both of its sides, and the closer bound tells.
    """
    bins = tl.arange(0, NUM_BINS)
    width = scale / bins_a_fall
    upper = tl.exp(-(bins.to(tl.float32) * width)) * (1.0 + _ROUNDING) * UNITS_OF_LARGEST
    lower = tl.exp(-((bins + 1).to(tl.float32) * width)) * (1.0 - _ROUNDING) * UNITS_OF_LARGEST
    most = tl.cumsum(counts * (upper.to(tl.int64) + 1), axis=0)
    least = tl.cumsum(counts * tl.maximum(lower.to(tl.int64) - 1, 0), axis=0)
    most_of_all = tl.max(most, axis=0)
    least_of_all = tl.max(least, axis=0)
    most_so_far = tl.minimum(most, weight - (least_of_all - least))
    least_so_far = tl.maximum(least, weight - (most_of_all - most))
    first = tl.sum((most_so_far < goal).to(tl.int32), axis=0)
    last = tl.sum((least_so_far < goal).to(tl.int32), axis=0)
    return first, tl.minimum(last, WEIGHTLESS - 1)


@triton.jit
def find_threshold(
    goal,
    first_bin,
    last_bin,
    counts,
    row_V,
    vocab_size,
    candidates_C,
    largest,
    scale,
    bins_a_fall,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """(the highest order at or above which the amounts reach the goal, tokens above, their weight).

    Amounts are tokens if COUNTS, else weights. The goal is reached in one of the bins from first to
    last. `candidates_C` is scratch.
    """
    bins = tl.arange(0, NUM_BINS)
    is_undecided = (bins >= first_bin) & (bins <= last_bin)
    num_undecided = tl.sum(tl.where(is_undecided, counts, 0), axis=0)
    if num_undecided <= NUM_CANDIDATES:
        count_above, weight_above = _write_candidates(
            first_bin,
            last_bin,
            row_V,
            vocab_size,
            candidates_C,
            largest,
            scale,
            bins_a_fall,
            TILE,
        )
        threshold, count, weight = _halve_candidates(
            goal,
            candidates_C,
            num_undecided,
            count_above,
            weight_above,
            largest,
            scale,
            COUNTS,
        )
    else:
        threshold, count, weight = _halve_row(
            goal,
            first_bin,
            last_bin,
            row_V,
            vocab_size,
            largest,
            scale,
            bins_a_fall,
            COUNTS,
            TILE,
        )
    return threshold, count, weight


@triton.jit
def _write_candidates(
    first_bin,
    last_bin,
    row_V,
    vocab_size,
    candidates_C,
    largest,
    scale,
    bins_a_fall,
    TILE: tl.constexpr,
):
    """(tokens above the first bin, their weight). Writes the logits from there to the last bin."""
    count_T = tl.zeros([TILE], tl.int32)
    weight_T = tl.zeros([TILE], tl.int64)
    num_written = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        logits = load_tile(row_V, start, vocab_size, TILE)
        weights = weigh(logits, largest, scale)
        bins = bins_of(logits, weights, largest, bins_a_fall)
        is_above = bins < first_bin
        count_T += is_above.to(tl.int32)
        weight_T += tl.where(is_above, weights, 0)
        is_undecided = ((bins >= first_bin) & (bins <= last_bin)).to(tl.int32)
        num_here = tl.sum(is_undecided, axis=0)
        if num_here > 0:
            places = num_written + tl.cumsum(is_undecided, axis=0) - 1
            tl.store(candidates_C + places, logits, mask=is_undecided > 0)
        num_written += num_here
    tl.debug_barrier()
    return tl.sum(count_T, axis=0).to(tl.int64), tl.sum(weight_T, axis=0)


@triton.jit
def _halve_candidates(
    goal,
    candidates_C,
    num_candidates,
    count_above,
    weight_above,
    largest,
    scale,
    COUNTS: tl.constexpr,
):
    logits = load_tile(candidates_C, 0, num_candidates, NUM_CANDIDATES)
    weights = weigh(logits, largest, scale)
    counts = (weights > 0).to(tl.int64)
    order = order_of(logits)
    amounts = counts if COUNTS else weights
    amount_above = count_above if COUNTS else weight_above
    low = tl.min(tl.where(weights > 0, order, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(order, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        amount = amount_above + tl.sum(tl.where(order >= middle, amounts, 0), axis=0)
        low = tl.where(amount >= goal, middle, low)
        high = tl.where(amount >= goal, high, middle)
    count = count_above + tl.sum(tl.where(order > low, counts, 0), axis=0)
    weight = weight_above + tl.sum(tl.where(order > low, weights, 0), axis=0)
    return low, count, weight


@triton.jit
def _halve_row(
    goal,
    first_bin,
    last_bin,
    row_V,
    vocab_size,
    largest,
    scale,
    bins_a_fall,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    low_T = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    high_T = tl.full([TILE], -0x80000000, tl.int32)
    for start in range(0, vocab_size, TILE):
        logits = load_tile(row_V, start, vocab_size, TILE)
        bins = bins_of(logits, weigh(logits, largest, scale), largest, bins_a_fall)
        is_undecided = (bins >= first_bin) & (bins <= last_bin)
        order = order_of(logits)
        low_T = tl.where(is_undecided, tl.minimum(low_T, order), low_T)
        high_T = tl.where(is_undecided, tl.maximum(high_T, order), high_T)
    low = tl.min(low_T, axis=0).to(tl.int64)
    high = tl.max(high_T, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count, weight = _add_from(middle, row_V, vocab_size, largest, scale, TILE)
        amount = count if COUNTS else weight
        low = tl.where(amount >= goal, middle, low)
        high = tl.where(amount >= goal, high, middle)
    count, weight = _add_from(low + 1, row_V, vocab_size, largest, scale, TILE)
    return low, count, weight


@triton.jit
def _add_from(order, row_V, vocab_size, largest, scale, TILE: tl.constexpr):
    """(tokens, their weight) of the logits at or above `order`."""
    count_T = tl.zeros([TILE], tl.int32)
    weight_T = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        logits = load_tile(row_V, start, vocab_size, TILE)
        weights = tl.where(order_of(logits) >= order, weigh(logits, largest, scale), 0)
        count_T += (weights > 0).to(tl.int32)
        weight_T += weights
    return tl.sum(count_T, axis=0).to(tl.int64), tl.sum(weight_T, axis=0)
