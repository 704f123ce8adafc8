"""Drawing a token from what temperature, top-k, top-p and min-p leave of each row.

Every filter is a threshold, as `kernels.reference.token_filters` explains; the draw inverts the
cumulative distribution of what stays, in the order of token ids. All sums are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_edits import SAMPLED
from kernels.triton.sampling_params import (
    DEEPEST_FALL,
    IS_DRAWN,
    NUM_INTS,
    NUM_REALS,
    SCALE,
    TOP_K,
    TOP_P,
    UNIFORM,
)
from kernels.triton.sampling_rows import falls, load_tile, of_order, order_of, weigh
from kernels.triton.sampling_threshold import (
    NUM_CANDIDATES,
    WEIGHTLESS,
    bin_of_rank,
    bins_of_share,
    bins_per_fall,
    count_bins,
    find_threshold,
)

_WEIGHTLESS_FALL = tl.constexpr(28.0)  # scaled: e^-28 is less than a unit
_NO_THRESHOLD = tl.constexpr(-(2**31))  # below the order of every float


@triton.jit
def draw_rows(
    logits_RV,
    ints_RF,
    reals_RF,
    largest_R,
    smallest_R,
    statuses_R,
    token_ids_R,
    candidates_RC,
    tile_weights_RB,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Overwrites the token of row `program_id(0)` if it is drawn and can be. Logits are edited.

    TILES is num_tiles or more, a power of two. Candidates and the weights of tiles are scratch.
    """
    row = tl.program_id(0)
    ints_F = ints_RF + row * NUM_INTS
    if (tl.load(ints_F + IS_DRAWN) > 0) & (tl.load(statuses_R + row) == SAMPLED):
        row_V = logits_RV + row.to(tl.int64) * vocab_size
        reals_F = reals_RF + row * NUM_REALS
        largest = tl.load(largest_R + row)
        scale = tl.load(reals_F + SCALE).to(tl.float32)
        threshold = _threshold(
            row_V,
            vocab_size,
            candidates_RC + row.to(tl.int64) * NUM_CANDIDATES,
            tl.load(ints_F + TOP_K),
            tl.load(reals_F + TOP_P),
            largest,
            tl.load(smallest_R + row),
            scale,
            TILE,
        )
        token_id = _invert(
            row_V,
            vocab_size,
            threshold,
            tl.load(reals_F + DEEPEST_FALL).to(tl.float32),
            tl.load(reals_F + UNIFORM),
            largest,
            scale,
            tile_weights_RB + row.to(tl.int64) * num_tiles,
            num_tiles,
            TILE,
            TILES,
        )
        tl.store(token_ids_R + row, token_id.to(tl.int64))


@triton.jit
def _threshold(
    row_V, vocab_size, candidates_C, top_k, top_p, largest, smallest, scale, TILE: tl.constexpr
):
    """The lowest order of a logit that top-k and top-p leave, int64."""
    threshold = tl.full([], _NO_THRESHOLD, tl.int64)
    if (top_k > 0) | (top_p < 1.0):
        bins_a_fall = bins_per_fall(tl.minimum(largest - smallest, _WEIGHTLESS_FALL / scale))
        counts, all_weigh = count_bins(row_V, vocab_size, largest, scale, bins_a_fall, TILE)
        weight = all_weigh
        if top_k > 0:
            kth_bin = bin_of_rank(counts, top_k)
            if kth_bin < WEIGHTLESS:
                kth, num_above, weight_above = find_threshold(
                    top_k,
                    kth_bin,
                    kth_bin,
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
                # k of them, whatever equals the last.
                weight_of_kth = weigh(of_order(kth.to(tl.int32)), largest, scale)
                weight = weight_above + (top_k - num_above) * weight_of_kth
                threshold = kth
        if top_p < 1.0:
            goal = tl.maximum((top_p * weight.to(tl.float64)).to(tl.int64), 1)
            first_bin, last_bin = bins_of_share(counts, goal, all_weigh, scale, bins_a_fall)
            # No lower than top-k's: the goal is a share of what that leaves.
            threshold, _, _ = find_threshold(
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
                False,
                TILE,
            )
    return threshold


@triton.jit
def _kept_weights(
    row_V, start, vocab_size, threshold, deepest_fall, largest, scale, TILE: tl.constexpr
):
    logits = load_tile(row_V, start, vocab_size, TILE)
    is_kept = order_of(logits) >= threshold
    is_kept &= falls(logits, largest) * scale <= deepest_fall
    return tl.where(is_kept, weigh(logits, largest, scale), 0)


@triton.jit
def _invert(
    row_V,
    vocab_size,
    threshold,
    deepest_fall,
    uniform,
    largest,
    scale,
    tile_weights_B,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The first id whose cumulative weight exceeds uniform * total."""
    for tile in range(num_tiles):
        weights = _kept_weights(
            row_V, tile * TILE, vocab_size, threshold, deepest_fall, largest, scale, TILE
        )
        tl.store(tile_weights_B + tile, tl.sum(weights, axis=0))
    tl.debug_barrier()
    tiles = tl.arange(0, TILES)
    tile_weights = tl.load(tile_weights_B + tiles, mask=tiles < num_tiles, other=0)
    total = tl.sum(tile_weights, axis=0)
    # Below the total, however the product is rounded.
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    tile = tl.sum((tl.cumsum(tile_weights, axis=0) <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(tiles < tile, tile_weights, 0), axis=0)
    weights = _kept_weights(
        row_V, tile * TILE, vocab_size, threshold, deepest_fall, largest, scale, TILE
    )
    is_before = before + tl.cumsum(weights, axis=0) <= target
    return tile * TILE + tl.sum(is_before.to(tl.int32), axis=0)
