"""Sampling: a step's rows in parallel, each by one thread from its raw logits to its token."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.library import INT, POINTER, function
from kernels.sampling_batch import Floats, Ints, LogprobRows, RowTokens, SampledRows, SamplingBatch


class _RowTokens(ctypes.Structure):
    _fields_ = (
        ("num_rows", INT),
        ("rows_E", POINTER),
        ("starts_E1", POINTER),
        ("token_ids_P", POINTER),
    )

    @classmethod
    def of(cls, tokens: RowTokens) -> _RowTokens:
        ids_P = tokens.token_ids_P
        return cls(
            len(tokens.rows_E), _address(tokens.rows_E), _address(tokens.starts_E1), _address(ids_P)
        )


class _SamplingBatch(ctypes.Structure):
    _fields_ = (
        ("logits_RV", POINTER),
        ("num_rows", INT),
        ("vocab_size", INT),
        ("counted", _RowTokens),
        ("output_counts_P", POINTER),
        ("repetition_E", POINTER),
        ("frequency_E", POINTER),
        ("presence_E", POINTER),
        ("biased", _RowTokens),
        ("biases_P", POINTER),
        ("allowed", _RowTokens),
        ("banned", _RowTokens),
        ("early_ends", _RowTokens),
        ("num_masked", INT),
        ("masked_rows_G", POINTER),
        ("bitmask_GW", POINTER),
        ("words_per_row", INT),
        ("num_drawn", INT),
        ("drawn_rows_D", POINTER),
        ("temperature_D", POINTER),
        ("top_k_D", POINTER),
        ("top_p_D", POINTER),
        ("min_p_D", POINTER),
        ("uniform_D", POINTER),
        ("num_told", INT),
        ("told_rows_L", POINTER),
        ("num_top_L", POINTER),
    )


class _SampledLogprobs(ctypes.Structure):
    _fields_ = (
        ("most_top", INT),
        ("logprobs_L", POINTER),
        ("ranks_L", POINTER),
        ("top_token_ids_LN", POINTER),
        ("top_logprobs_LN", POINTER),
    )


def sample_rows(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    """As `kernels.reference.sampling.sample_rows`. Raises TypeError for other logits than float32
    and contiguous ones on a CPU, ValueError for a row or a token that is none of theirs."""
    _check_logits(logits_RV)
    c_batch = _c_batch(logits_RV, batch)
    num_rows = logits_RV.shape[0]
    token_ids_R, statuses_R = np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
    logprobs, c_logprobs = None, _SampledLogprobs()
    if batch.told is not None:
        logprobs, c_logprobs = _new_logprobs(batch.told.num_top_L, logits_RV.shape[1])
    sample = function("ft_sample_rows", (POINTER, POINTER, POINTER, POINTER), ctypes.c_int)
    _check(
        sample(
            ctypes.addressof(c_batch),
            ctypes.addressof(c_logprobs),
            _address(token_ids_R),
            _address(statuses_R),
        )
    )
    return SampledRows(token_ids_R, statuses_R, logprobs)


def token_logprobs(logits_LV: Tensor, token_ids_L: Ints, num_top_L: Ints) -> LogprobRows:
    """As `kernels.reference.token_logprobs.token_logprobs`; raises as `sample_rows`."""
    _check_logits(logits_LV)
    logprobs, c_logprobs = _new_logprobs(num_top_L, logits_LV.shape[1])
    tell = function("ft_token_logprobs", (POINTER, INT, INT, *[POINTER] * 3), ctypes.c_int)
    _check(
        tell(
            logits_LV.data_ptr(),
            *logits_LV.shape,
            _address(token_ids_L),
            _address(num_top_L),
            ctypes.addressof(c_logprobs),
        )
    )
    return logprobs


def random_uniforms(seeds: NDArray[np.uint64], sample_indices: Ints, positions: Ints) -> Floats:
    """As `kernels.reference.random_uniform.random_uniforms`."""
    uniforms = np.empty(len(seeds))
    generate = function("ft_random_uniforms", (INT, *[POINTER] * 4))
    addresses = [_address(array) for array in (seeds, sample_indices, positions, uniforms)]
    generate(len(seeds), *addresses)
    return uniforms


def _c_batch(logits_RV: Tensor, batch: SamplingBatch) -> _SamplingBatch:
    """Points into the batch's arrays, and is valid while they are."""
    c_batch = _SamplingBatch(logits_RV.data_ptr(), *logits_RV.shape)
    if (penalties := batch.penalties) is not None:
        c_batch.counted = _RowTokens.of(penalties.tokens)
        c_batch.output_counts_P = _address(penalties.output_counts_P)
        c_batch.repetition_E = _address(penalties.repetition_E)
        c_batch.frequency_E = _address(penalties.frequency_E)
        c_batch.presence_E = _address(penalties.presence_E)
    if (biases := batch.biases) is not None:
        c_batch.biased = _RowTokens.of(biases.tokens)
        c_batch.biases_P = _address(biases.biases_P)
    if batch.allowed is not None:
        c_batch.allowed = _RowTokens.of(batch.allowed)
    if batch.banned is not None:
        c_batch.banned = _RowTokens.of(batch.banned)
    if batch.early_ends is not None:
        c_batch.early_ends = _RowTokens.of(batch.early_ends)
    if (mask := batch.mask) is not None:
        _check_mask(mask.words_GW, len(mask.rows_G), logits_RV.shape[1])
        c_batch.num_masked = len(mask.rows_G)
        c_batch.masked_rows_G = _address(mask.rows_G)
        c_batch.bitmask_GW = mask.words_GW.data_ptr()
        c_batch.words_per_row = mask.words_GW.shape[1]
    if (draws := batch.draws) is not None:
        c_batch.num_drawn = len(draws.rows_D)
        c_batch.drawn_rows_D = _address(draws.rows_D)
        c_batch.temperature_D = _address(draws.temperature_D)
        c_batch.top_k_D = _address(draws.top_k_D)
        c_batch.top_p_D = _address(draws.top_p_D)
        c_batch.min_p_D = _address(draws.min_p_D)
        c_batch.uniform_D = _address(draws.uniform_D)
    if (told := batch.told) is not None:
        c_batch.num_told = len(told.rows_L)
        c_batch.told_rows_L = _address(told.rows_L)
        c_batch.num_top_L = _address(told.num_top_L)
    return c_batch


def _new_logprobs(num_top_L: Ints, vocab_size: int) -> tuple[LogprobRows, _SampledLogprobs]:
    num_rows, most_top = len(num_top_L), int(num_top_L.max(initial=0))
    if most_top > vocab_size or num_top_L.min(initial=0) < 0:
        raise ValueError(f"a row can tell of 0 to {vocab_size} tokens")
    rows = LogprobRows(
        logprobs_L=np.zeros(num_rows, np.float32),
        ranks_L=np.zeros(num_rows, np.int64),
        top_token_ids_LN=np.zeros((num_rows, most_top), np.int64),
        top_logprobs_LN=np.zeros((num_rows, most_top), np.float32),
    )
    return rows, _SampledLogprobs(
        most_top,
        _address(rows.logprobs_L),
        _address(rows.ranks_L),
        _address(rows.top_token_ids_LN),
        _address(rows.top_logprobs_LN),
    )


def _address(array: NDArray[np.generic]) -> int:
    """Of a contiguous array, which must outlive the call."""
    address: int = array.__array_interface__["data"][0]
    return address


def _check_logits(logits_RV: Tensor) -> None:
    if logits_RV.dtype != torch.float32 or not logits_RV.is_cpu or not logits_RV.is_contiguous():
        raise TypeError("the logits are not float32 and contiguous on a CPU")


def _check_mask(words_GW: Tensor, num_rows: int, vocab_size: int) -> None:
    if words_GW.dtype != torch.int32 or not words_GW.is_cpu or not words_GW.is_contiguous():
        raise TypeError("the bitmask is not int32 and contiguous on a CPU")
    if words_GW.shape[0] != num_rows or words_GW.shape[1] * 32 < vocab_size:
        raise ValueError(f"a bitmask of {tuple(words_GW.shape)} is not one of {num_rows} rows")


def _check(code: int) -> None:
    if code != 0:
        raise ValueError("a row or a token is not one of the logits'")
