"""Log probabilities of given tokens and of the likeliest ones, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling_params import (
    NUM_TOLD_INTS,
    NUM_TOP,
    TOLD_COPY,
    TOLD_ROW,
)
from kernels.triton.sampling_results import ToldResults
from kernels.triton.sampling_rows import (
    PROGRAM_OPTIONS,
    UNITS_OF_LARGEST,
    load_tile,
    order_of,
    scan_row,
    tile_size,
    weigh,
)
from kernels.triton.sampling_threshold import (
    NUM_CANDIDATES,
    bin_of_rank,
    bins_per_fall,
    count_bins,
    find_threshold,
)

_MOST_TOP = 1024  # their ranks are found by comparing each with each
_OTHERS = tl.constexpr(32)  # that are compared at once


def launch_logprobs(
    logits_RV: Tensor,
    raw_copies_CV: Tensor,
    told_LF: Tensor,
    token_ids_R: Tensor,
    results: ToldResults,
) -> None:
    """Rows are as they were, but for those with a raw copy.

    Raises ValueError for more than 1,024 likeliest tokens.
    """
    num_rows, most_top = results.top_token_ids_LN.shape
    if most_top > _MOST_TOP:
        raise ValueError(f"a row can tell of {_MOST_TOP} tokens at most")
    places = max(triton.next_power_of_2(most_top), _OTHERS.value)
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    _tell_rows[(num_rows,)](
        logits_RV,
        raw_copies_CV,
        told_LF,
        token_ids_R,
        results.logprobs_L,
        results.ranks_L,
        results.top_token_ids_LN,
        results.top_logprobs_LN,
        torch.empty((num_rows, NUM_CANDIDATES.value), device=device),
        torch.empty((num_rows, places), dtype=torch.int64, device=device),
        vocab_size,
        most_top,
        TILE=tile_size(vocab_size),
        PLACES=places,
        **PROGRAM_OPTIONS,
    )


@triton.jit(do_not_specialize=["most_top"])
def _tell_rows(
    logits_RV,
    raw_copies_CV,
    told_LF,
    token_ids_R,
    logprobs_L,
    ranks_L,
    top_token_ids_LN,
    top_logprobs_LN,
    candidates_LC,
    found_LM,
    vocab_size,
    most_top,
    TILE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The row of told record `program_id(0)`. The last two before the sizes are scratch."""
    told = tl.program_id(0)
    told_F = told_LF + told * NUM_TOLD_INTS
    row = tl.load(told_F + TOLD_ROW)
    copy = tl.load(told_F + TOLD_COPY)
    if copy >= 0:
        row_V = raw_copies_CV + copy.to(tl.int64) * vocab_size
    else:
        row_V = logits_RV + row.to(tl.int64) * vocab_size
    largest, _, smallest, _, is_finite = scan_row(row_V, vocab_size, TILE)
    if is_finite == 0:
        tl.store(logprobs_L + told, float("nan"))
    else:
        chosen = tl.load(row_V + tl.load(token_ids_R + row))
        weight_T = tl.zeros([TILE], tl.int64)
        num_likelier_T = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            logits = load_tile(row_V, start, vocab_size, TILE)
            weight_T += weigh(logits, largest, 1.0)
            num_likelier_T += (logits > chosen).to(tl.int32)
        total = tl.sum(weight_T, axis=0).to(tl.float32) / UNITS_OF_LARGEST
        log_total = tl.maximum(tl.log(total), 0.0)  # the largest alone weighs 1
        tl.store(logprobs_L + told, chosen - largest - log_total)
        tl.store(ranks_L + told, tl.sum(num_likelier_T, axis=0) + 1)
        num_top = tl.load(told_F + NUM_TOP)
        if num_top > 0:
            found_M = found_LM + told.to(tl.int64) * PLACES
            candidates_C = candidates_LC + told.to(tl.int64) * NUM_CANDIDATES
            _collect(row_V, vocab_size, num_top, largest, smallest, candidates_C, found_M, TILE)
            places = tl.arange(0, PLACES)
            is_found = places < num_top
            found = tl.load(found_M + places, mask=is_found, other=0)
            ranks = _ranks(found, found_M, num_top, PLACES)
            ids = 0x7FFFFFFF - (found & 0x7FFFFFFF)
            top = told.to(tl.int64) * most_top + ranks
            tl.store(top_token_ids_LN + top, ids, mask=is_found)
            logits = tl.load(row_V + ids, mask=is_found, other=0.0)
            tl.store(top_logprobs_LN + top, logits - largest - log_total, mask=is_found)


@triton.jit
def _collect(
    row_V, vocab_size, num_top, largest, smallest, candidates_C, found_M, TILE: tl.constexpr
):
    """Writes the `num_top` likeliest tokens in the order of ids, each as a number that is the
    larger the likelier it is, or the lower its id among equals."""
    # All tokens count, however little they weigh: at a scale of 0 they weigh the same.
    scale = 0.0
    bins_a_fall = bins_per_fall(largest - smallest)
    counts, _ = count_bins(row_V, vocab_size, largest, scale, bins_a_fall, TILE)
    last_bin = bin_of_rank(counts, num_top)
    threshold, num_above, _ = find_threshold(
        num_top,
        last_bin,
        last_bin,
        counts,
        row_V,
        vocab_size,
        candidates_C,
        largest,
        scale,
        bins_a_fall,
        True,
        TILE,
    )
    num_equals = num_top - num_above.to(tl.int32)  # of those that equal the last, the first ones
    num_found = tl.zeros([], tl.int32)
    num_equals_seen = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        order = order_of(load_tile(row_V, start, vocab_size, TILE)).to(tl.int64)
        is_equal = order == threshold
        num_taken_here = tl.sum((order >= threshold).to(tl.int32), axis=0)
        if num_taken_here > 0:
            equal_places = num_equals_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
            is_taken = (order > threshold) | (is_equal & (equal_places <= num_equals))
            places = num_found + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
            tl.store(found_M + places, (order << 31) + (0x7FFFFFFF - ids), mask=is_taken)
            num_found += tl.sum(is_taken.to(tl.int32), axis=0)
            num_equals_seen += tl.sum(is_equal.to(tl.int32), axis=0)
    tl.debug_barrier()


@triton.jit
def _ranks(found, found_M, count, PLACES: tl.constexpr):
    """How many of the numbers are larger than each."""
    ranks = tl.zeros([PLACES], tl.int32)
    for start in range(0, count, _OTHERS):
        others = start + tl.arange(0, _OTHERS)
        is_other = others < count
        values = tl.load(found_M + others, mask=is_other, other=0)
        is_larger = (values[None, :] > found[:, None]) & is_other[None, :]
        ranks += tl.sum(is_larger.to(tl.int32), axis=1)
    return ranks
