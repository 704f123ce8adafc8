"""What requests do to their rows' logits, and whether a token is left to sample."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_batch import RowStatus
from kernels.triton.sampling_params import (
    ALLOWED,
    BANNED,
    BIASED,
    COUNTED,
    EARLY_ENDS,
    FREQUENCY,
    IS_EDITED,
    MASK,
    NUM_INTS,
    NUM_REALS,
    PRESENCE,
    RAW_COPY,
    REPETITION,
)
from kernels.triton.sampling_rows import load_tile, scan_row

SAMPLED = tl.constexpr(RowStatus.SAMPLED.value)
_NOT_FINITE = tl.constexpr(RowStatus.NOT_FINITE.value)
_NOTHING_ALLOWED = tl.constexpr(RowStatus.NOTHING_ALLOWED.value)
_OVERFLOWS = tl.constexpr(RowStatus.OVERFLOWS.value)
_PAIRS = tl.constexpr(512)  # of one row that are looked at at once


@triton.jit(do_not_specialize=["words_per_row"])  # there may be no bitmask
def edit_rows(
    logits_RV,
    raw_copies_CV,
    ints_RF,
    reals_RF,
    token_ids_P,
    amounts_P,
    words_GW,
    saved_P,
    largest_R,
    smallest_R,
    greedy_ids_R,
    statuses_R,
    vocab_size,
    words_per_row,
    TILE: tl.constexpr,
):
    """Edits row `program_id(0)` in place, in the order of `SamplingBatch`.

    Writes its largest and its smallest logit (but for -inf), the largest's lowest id (0 where the
    row can't be sampled) and its status. Raw logits that are told of are copied before an edit.
    `saved_P` is scratch.
    """
    row = tl.program_id(0)
    row_V = logits_RV + row.to(tl.int64) * vocab_size
    ints_F = ints_RF + row * NUM_INTS
    reals_F = reals_RF + row * NUM_REALS

    largest, first_id, smallest, is_below_infinity, is_finite = scan_row(row_V, vocab_size, TILE)
    is_edited = tl.load(ints_F + IS_EDITED)
    if is_finite * is_edited > 0:
        raw_copy = tl.load(ints_F + RAW_COPY)
        if raw_copy >= 0:
            _copy_row(row_V, raw_copies_CV + raw_copy.to(tl.int64) * vocab_size, vocab_size, TILE)
        _penalize(row_V, ints_F, reals_F, token_ids_P, amounts_P)
        _bias(row_V, ints_F, token_ids_P, amounts_P)
        _keep_allowed(row_V, ints_F, token_ids_P, saved_P, vocab_size, TILE)
        _forbid(row_V, ints_F + BANNED, token_ids_P)
        mask = tl.load(ints_F + MASK)
        if mask >= 0:
            _mask_row(row_V, words_GW + mask.to(tl.int64) * words_per_row, vocab_size, TILE)
        _save(row_V, ints_F + EARLY_ENDS, token_ids_P, saved_P)
        _forbid(row_V, ints_F + EARLY_ENDS, token_ids_P)
        largest, first_id, smallest, is_below_infinity, _ = scan_row(row_V, vocab_size, TILE)
        if (largest == float("-inf")) | (is_below_infinity == 0):
            _give_back(row_V, ints_F + EARLY_ENDS, token_ids_P, saved_P)
            largest, first_id, smallest, is_below_infinity, _ = scan_row(row_V, vocab_size, TILE)

    status = tl.where(largest == float("-inf"), _NOTHING_ALLOWED, SAMPLED)
    status = tl.where(is_below_infinity > 0, status, _OVERFLOWS)
    status = tl.where(is_finite > 0, status, _NOT_FINITE)
    tl.store(statuses_R + row, status)
    tl.store(greedy_ids_R + row, tl.where(status == SAMPLED, first_id, 0).to(tl.int64))
    tl.store(largest_R + row, largest)
    tl.store(smallest_R + row, smallest)


@triton.jit
def _pairs(list_2, start, token_ids_P):
    """(places of some pairs, which of them there are, their token ids)."""
    places = start + tl.arange(0, _PAIRS)
    is_pair = places < tl.load(list_2 + 1)
    return places, is_pair, tl.load(token_ids_P + places, mask=is_pair, other=0)


@triton.jit
def _penalize(row_V, ints_F, reals_F, token_ids_P, amounts_P):
    repetition = tl.load(reals_F + REPETITION).to(tl.float32)
    frequency = tl.load(reals_F + FREQUENCY)
    presence = tl.load(reals_F + PRESENCE)
    for start in range(tl.load(ints_F + COUNTED), tl.load(ints_F + COUNTED + 1), _PAIRS):
        places, is_pair, ids = _pairs(ints_F + COUNTED, start, token_ids_P)
        counts = tl.load(amounts_P + places, mask=is_pair, other=0).to(tl.float64)
        loss = (frequency * counts + tl.where(counts > 0, presence, 0.0)).to(tl.float32)
        logits = tl.load(row_V + ids, mask=is_pair, other=0.0)
        shrunk = tl.div_rn(logits, repetition)
        logits = tl.where(logits > 0, shrunk, logits * repetition) - loss
        tl.store(row_V + ids, logits, mask=is_pair)
    tl.debug_barrier()


@triton.jit
def _bias(row_V, ints_F, token_ids_P, amounts_P):
    for start in range(tl.load(ints_F + BIASED), tl.load(ints_F + BIASED + 1), _PAIRS):
        places, is_pair, ids = _pairs(ints_F + BIASED, start, token_ids_P)
        biases = tl.load(amounts_P + places, mask=is_pair, other=0).to(tl.float32, bitcast=True)
        logits = tl.load(row_V + ids, mask=is_pair, other=0.0)
        tl.store(row_V + ids, logits + biases, mask=is_pair)
    tl.debug_barrier()


@triton.jit
def _keep_allowed(row_V, ints_F, token_ids_P, saved_P, vocab_size, TILE: tl.constexpr):
    if tl.load(ints_F + ALLOWED) < tl.load(ints_F + ALLOWED + 1):
        _save(row_V, ints_F + ALLOWED, token_ids_P, saved_P)
        for start in range(0, vocab_size, TILE):
            ids = start + tl.arange(0, TILE)
            tl.store(row_V + ids, float("-inf"), mask=ids < vocab_size)
        tl.debug_barrier()
        _give_back(row_V, ints_F + ALLOWED, token_ids_P, saved_P)


@triton.jit
def _forbid(row_V, list_2, token_ids_P):
    for start in range(tl.load(list_2), tl.load(list_2 + 1), _PAIRS):
        _, is_pair, ids = _pairs(list_2, start, token_ids_P)
        tl.store(row_V + ids, float("-inf"), mask=is_pair)
    tl.debug_barrier()


@triton.jit
def _save(row_V, list_2, token_ids_P, saved_P):
    for start in range(tl.load(list_2), tl.load(list_2 + 1), _PAIRS):
        places, is_pair, ids = _pairs(list_2, start, token_ids_P)
        logits = tl.load(row_V + ids, mask=is_pair, other=0.0)
        tl.store(saved_P + places, logits, mask=is_pair)
    tl.debug_barrier()


@triton.jit
def _give_back(row_V, list_2, token_ids_P, saved_P):
    for start in range(tl.load(list_2), tl.load(list_2 + 1), _PAIRS):
        places, is_pair, ids = _pairs(list_2, start, token_ids_P)
        logits = tl.load(saved_P + places, mask=is_pair, other=0.0)
        tl.store(row_V + ids, logits, mask=is_pair)
    tl.debug_barrier()


@triton.jit
def _mask_row(row_V, words_W, vocab_size, TILE: tl.constexpr):
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        words = tl.load(words_W + (ids >> 5), mask=ids < vocab_size, other=-1)
        is_forbidden = ((words >> (ids & 31)) & 1) == 0
        tl.store(row_V + ids, float("-inf"), mask=is_forbidden)
    tl.debug_barrier()


@triton.jit
def _copy_row(row_V, copy_V, vocab_size, TILE: tl.constexpr):
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = load_tile(row_V, start, vocab_size, TILE)
        tl.store(copy_V + ids, logits, mask=ids < vocab_size)
    tl.debug_barrier()
