"""A step's sampling parameters as arrays for the device, which take one copy.

Each row has a record of what its request asks, so that a row's program finds its own and no other:

    ints_RF    [ first and last pair of each list | mask | top_k | is drawn | raw copy ]   int32
    reals_RF   [ penalties | temperature, top_p, min_p and uniform of a draw ]            float64

    pairs      | counted tokens | biased | allowed | banned | early ends |   of all rows
    amounts    | output counts  | biases |                                   by pair
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.array_places import HostArray
from kernels.sampling_batch import (
    Draws,
    Floats,
    GivenTokens,
    Ints,
    Penalties,
    SamplingBatch,
    TokenMask,
    ToldRows,
)
from kernels.triton.sampling_rows import LARGEST_VOCAB

# Places in a row's record of ints: the first pair of a list, and the one after it its last.
COUNTED = tl.constexpr(0)
BIASED = tl.constexpr(2)
ALLOWED = tl.constexpr(4)
BANNED = tl.constexpr(6)
EARLY_ENDS = tl.constexpr(8)
MASK = tl.constexpr(10)  # row of the bitmask; -1: none
TOP_K = tl.constexpr(11)  # 0: off
IS_DRAWN = tl.constexpr(12)
IS_EDITED = tl.constexpr(13)
RAW_COPY = tl.constexpr(14)  # row of the raw logits to keep; -1: none
NUM_INTS = tl.constexpr(16)

# In that of reals.
REPETITION = tl.constexpr(0)
FREQUENCY = tl.constexpr(1)
PRESENCE = tl.constexpr(2)
SCALE = tl.constexpr(3)  # 1 / temperature
TOP_P = tl.constexpr(4)
DEEPEST_FALL = tl.constexpr(5)  # -log(min_p), in units of the temperature
UNIFORM = tl.constexpr(6)
NUM_REALS = tl.constexpr(8)

# In that of a row that tells logprobs.
TOLD_ROW = tl.constexpr(0)
NUM_TOP = tl.constexpr(1)
TOLD_COPY = tl.constexpr(2)  # row of the raw logits that were kept; -1: the logits'
NUM_TOLD_INTS = tl.constexpr(4)


class DeviceParams(NamedTuple):
    """The arrays of `pack_params`, on the device."""

    reals_RF: Tensor  # float64, all others int32
    ints_RF: Tensor
    token_ids_P: Tensor
    amounts_P: Tensor  # int32, or a float32's bits
    words_GW: Tensor
    told_LF: Tensor


@dataclass(frozen=True, slots=True)
class PackedParams:
    arrays: tuple[HostArray, ...]  # in the order of DeviceParams
    num_raw_copies: int


def pack_params(batch: SamplingBatch, num_rows: int, vocab_size: int) -> PackedParams:
    """Raises ValueError for a row or a token that is none of the logits', TypeError for a bitmask
    that isn't int32 and contiguous on the CPU, whose words are read when the arrays are."""
    ints_RF = np.zeros((num_rows, NUM_INTS.value), np.int32)
    ints_RF[:, (MASK.value, RAW_COPY.value)] = -1
    reals_RF = np.zeros((num_rows, NUM_REALS.value))
    token_ids_P = _set_lists(batch, vocab_size, ints_RF)
    if batch.penalties is not None:
        _set_penalties(batch.penalties, reals_RF)
    words_GW = np.empty((0, 0), np.int32)
    if batch.mask is not None:
        words_GW = _set_mask(batch.mask, vocab_size, ints_RF)
    if batch.draws is not None:
        _set_draws(batch.draws, vocab_size, ints_RF, reals_RF)
    told_LF = np.empty((0, NUM_TOLD_INTS.value), np.int32)
    if batch.told is not None:
        told_LF = _set_told(batch.told, vocab_size, ints_RF)  # the last: all edits are known
    num_pairs = sum(map(len, token_ids_P))
    arrays = (
        HostArray(reals_RF.shape, np.float64, [reals_RF]),
        HostArray(ints_RF.shape, np.int32, [ints_RF]),
        HostArray((num_pairs,), np.int32, token_ids_P),
        HostArray((num_pairs,), np.int32, _amounts(batch)),
        HostArray(words_GW.shape, np.int32, [words_GW]),
        HostArray(told_LF.shape, np.int32, [told_LF]),
    )
    return PackedParams(arrays, int((ints_RF[:, RAW_COPY.value] >= 0).sum()))


def given_arrays(tokens: GivenTokens, vocab_size: int) -> tuple[HostArray, HostArray]:
    """(token ids, told records). Raises ValueError as `pack_params`."""
    token_ids_L = tokens.token_ids_L
    check_places(token_ids_L, vocab_size)
    told_LF = told_records(np.arange(len(token_ids_L)), tokens.num_top_L, vocab_size)
    return (
        HostArray(token_ids_L.shape, np.int64, [token_ids_L]),
        HostArray(told_LF.shape, np.int32, [told_LF]),
    )


def told_records(rows_L: Ints, num_top_L: Ints, vocab_size: int) -> NDArray[np.int32]:
    """[L, NUM_TOLD_INTS], of raw logits as they are. Raises ValueError for more than V tokens."""
    if num_top_L.min(initial=0) < 0 or num_top_L.max(initial=0) > vocab_size:
        raise ValueError(f"a row can tell of 0 to {vocab_size} tokens")
    told_LF = np.zeros((len(rows_L), NUM_TOLD_INTS.value), np.int32)
    told_LF[:, TOLD_ROW.value] = rows_L
    told_LF[:, NUM_TOP.value] = num_top_L
    told_LF[:, TOLD_COPY.value] = -1
    return told_LF


def check_logits(logits_RV: Tensor) -> None:
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        raise TypeError("the logits are not float32 and contiguous")
    if logits_RV.shape[1] > LARGEST_VOCAB:
        raise ValueError(f"a vocabulary of {logits_RV.shape[1]} is larger than {LARGEST_VOCAB}")


def check_places(places: Ints, size: int) -> None:
    if places.min(initial=0) < 0 or places.max(initial=0) >= size:
        raise ValueError("a row or a token is not one of the logits'")


def _set_lists(batch: SamplingBatch, vocab_size: int, ints_RF: NDArray[np.int32]) -> list[Ints]:
    """The pairs of all lists; those with amounts come first."""
    lists = (
        (COUNTED, None if batch.penalties is None else batch.penalties.tokens),
        (BIASED, None if batch.biases is None else batch.biases.tokens),
        (ALLOWED, batch.allowed),
        (BANNED, batch.banned),
        (EARLY_ENDS, batch.early_ends),
    )
    token_ids_P: list[Ints] = []
    first_pair = 0
    for place, tokens in lists:
        if tokens is None:
            continue
        rows_E = tokens.rows_E
        check_places(rows_E, len(ints_RF))
        check_places(tokens.token_ids_P, vocab_size)
        ints_RF[rows_E, place.value] = first_pair + tokens.starts_E1[:-1]
        ints_RF[rows_E, place.value + 1] = first_pair + tokens.starts_E1[1:]
        ints_RF[rows_E, IS_EDITED.value] = 1
        first_pair += len(tokens.token_ids_P)
        token_ids_P.append(tokens.token_ids_P)
    return token_ids_P


def _amounts(batch: SamplingBatch) -> list[NDArray[np.int32]]:
    amounts: list[NDArray[np.int32]] = []
    if batch.penalties is not None:
        amounts.append(batch.penalties.output_counts_P.astype(np.int32))
    if batch.biases is not None:
        amounts.append(batch.biases.biases_P.astype(np.float32).view(np.int32))
    return amounts


def _set_penalties(penalties: Penalties, reals_RF: Floats) -> None:
    rows_E = penalties.tokens.rows_E
    reals_RF[rows_E, REPETITION.value] = penalties.repetition_E
    reals_RF[rows_E, FREQUENCY.value] = penalties.frequency_E
    reals_RF[rows_E, PRESENCE.value] = penalties.presence_E


def _set_mask(mask: TokenMask, vocab_size: int, ints_RF: NDArray[np.int32]) -> NDArray[np.int32]:
    """Its words."""
    words_GW, num_masked = mask.words_GW, len(mask.rows_G)
    if words_GW.dtype != torch.int32 or not words_GW.is_cpu or not words_GW.is_contiguous():
        raise TypeError("the bitmask is not int32 and contiguous on a CPU")
    if words_GW.shape[0] != num_masked or words_GW.shape[1] * 32 < vocab_size:
        raise ValueError(f"a bitmask of {tuple(words_GW.shape)} is not one of {num_masked} rows")
    check_places(mask.rows_G, len(ints_RF))
    ints_RF[mask.rows_G, MASK.value] = np.arange(num_masked)
    ints_RF[mask.rows_G, IS_EDITED.value] = 1
    return np.asarray(words_GW)


def _set_draws(draws: Draws, vocab_size: int, ints_RF: NDArray[np.int32], reals_RF: Floats) -> None:
    rows_D = draws.rows_D
    check_places(rows_D, len(ints_RF))
    is_on_D = (draws.top_k_D > 0) & (draws.top_k_D < vocab_size)
    ints_RF[rows_D, TOP_K.value] = np.where(is_on_D, draws.top_k_D, 0)
    ints_RF[rows_D, IS_DRAWN.value] = 1
    with np.errstate(divide="ignore", over="ignore"):
        reals_RF[rows_D, DEEPEST_FALL.value] = -np.log(draws.min_p_D)  # infinite, where it is off
        scale_D = 1.0 / draws.temperature_D
    # As a float of the kernels it must be finite: 0 times infinity would be a NaN.
    reals_RF[rows_D, SCALE.value] = np.minimum(scale_D, np.finfo(np.float32).max)
    reals_RF[rows_D, TOP_P.value] = draws.top_p_D
    reals_RF[rows_D, UNIFORM.value] = draws.uniform_D


def _set_told(told: ToldRows, vocab_size: int, ints_RF: NDArray[np.int32]) -> NDArray[np.int32]:
    """Its records. An edited row's raw logits are to be kept."""
    check_places(told.rows_L, len(ints_RF))
    told_LF = told_records(told.rows_L, told.num_top_L, vocab_size)
    is_edited_L = ints_RF[told.rows_L, IS_EDITED.value] > 0
    told_LF[is_edited_L, TOLD_COPY.value] = np.arange(is_edited_L.sum())
    ints_RF[told.rows_L, RAW_COPY.value] = told_LF[:, TOLD_COPY.value]
    return told_LF
