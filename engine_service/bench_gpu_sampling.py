"""Sampling in Triton for `bench_gpu`: beside the reference, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine_service.bench_gpu_errors import poisoned, within
from engine_service.bench_gpu_items import Figures, Item
from engine_service.bench_gpu_timing import host_seconds
from kernels.sampling_batch import (
    Draws,
    Penalties,
    RowTokens,
    SampledRows,
    SamplingBatch,
    ToldRows,
)
from kernels.sampling_ops import reference_sampling_ops, triton_sampling_ops

# A uniform that falls on the edge between two tokens may give either.
_DRAWS_THAT_MAY_DIFFER: Final = 0.02
_LOGPROBS_BOUND: Final = 1e-4
_DEVIATION: Final = 4.0  # of logits: some tens of tokens make up 90 % of a row
_SPOILT_ROW: Final = 3

MakeBatch = Callable[[int, int], SamplingBatch]  # of so many rows and tokens


def check_items(num_rows: int, vocab_size: int, device: torch.device) -> list[Item]:
    kinds: dict[str, MakeBatch] = {
        "greedy": _greedy,
        "temperature": partial(_drawn, top_p=1.0),
        "top_p": partial(_drawn, top_p=0.9),
        "top_k": partial(_drawn, top_p=1.0, top_k=50),
        "penalties": _penalized,
        "logprobs": _told,
    }
    items = [
        Item(f"sampling, {name}", partial(_check, make, num_rows, vocab_size, device))
        for name, make in kinds.items()
    ]
    return [
        *items,
        Item("sampling, bits of rows", partial(_check_bits, num_rows, vocab_size, device)),
        Item("sampling, a row that is NaN", partial(_check_nan, num_rows, vocab_size, device)),
    ]


def timing_items(num_rows: int, vocab_size: int) -> list[Item]:
    kinds: dict[str, MakeBatch] = {"greedy": _greedy, "top_p": partial(_drawn, top_p=0.9)}
    return [
        Item(f"sampling of {num_rows} rows, {name}", partial(_time, make, num_rows, vocab_size))
        for name, make in kinds.items()
    ]


def _time(make: MakeBatch, num_rows: int, vocab_size: int) -> Figures:
    """From the batch on the host to tokens on the host; logits are read once by this measure."""
    logits_RV = _logits(num_rows, vocab_size, torch.device("cuda"))
    batch, ops = make(num_rows, vocab_size), triton_sampling_ops()
    seconds = host_seconds(lambda: ops.sample_rows(logits_RV, batch))
    return {"us": seconds * 1e6, "gb_s": logits_RV.nbytes / seconds * 1e-9}


def _check(make: MakeBatch, num_rows: int, vocab_size: int, device: torch.device) -> Figures:
    """The share of tokens that differ from the reference's, or how far a logprob is from it."""
    logits_RV, batch = _logits(num_rows, vocab_size, device), make(num_rows, vocab_size)
    got = _sample(logits_RV.clone(), batch)
    logits_RV = logits_RV.cpu()
    exact_RV = logits_RV.double() if batch.told is None else logits_RV  # logprobs are of float32
    exact = reference_sampling_ops().sample_rows(exact_RV, batch)
    if not np.array_equal(got.statuses_R, exact.statuses_R):
        return within(0.0, [float("nan")])
    if got.logprobs is not None and exact.logprobs is not None:
        error = np.abs(got.logprobs.logprobs_L - exact.logprobs.logprobs_L).max()
        same_ids = np.array_equal(got.logprobs.top_token_ids_LN, exact.logprobs.top_token_ids_LN)
        return within(_LOGPROBS_BOUND, [float(error) if same_ids else float("nan")])
    differing = float((got.token_ids_R != exact.token_ids_R).mean())
    return within(0.0 if batch.draws is None else _DRAWS_THAT_MAY_DIFFER, [differing])


def _check_bits(num_rows: int, vocab_size: int, device: torch.device) -> Figures:
    """Of rows that are drawn among many, and alone."""
    logits_RV = _logits(num_rows, vocab_size, device)
    batch = _drawn(num_rows, vocab_size, top_p=0.9)
    told = ToldRows(np.arange(num_rows), np.full(num_rows, 3))
    together = _sample(logits_RV.clone(), replace(batch, told=told))
    assert batch.draws is not None and together.logprobs is not None
    num_differing = 0
    for row in (0, num_rows // 2, num_rows - 1):
        draws = replace(batch.draws[slice(row, row + 1)], rows_D=np.array([0]))
        one = SamplingBatch(draws=draws, told=ToldRows(np.array([0]), np.array([3])))
        alone = _sample(logits_RV[row : row + 1].clone(), one)
        assert alone.logprobs is not None
        is_same = alone.token_ids_R[0] == together.token_ids_R[row] and np.array_equal(
            alone.logprobs.top_logprobs_LN[0], together.logprobs.top_logprobs_LN[row]
        )
        num_differing += not is_same
    return within(0.0, [float(num_differing)])


def _check_nan(num_rows: int, vocab_size: int, device: torch.device) -> Figures:
    """It fails, and it alone; the share of rows whose status is not the reference's."""
    logits_RV = _logits(num_rows, vocab_size, device)
    logits_RV[_SPOILT_ROW, vocab_size - 1] = torch.nan
    batch = _drawn(num_rows, vocab_size, top_p=0.9)
    got = _sample(logits_RV.clone(), batch)
    exact = reference_sampling_ops().sample_rows(logits_RV.cpu().double(), batch)
    return within(0.0, [float((got.statuses_R != exact.statuses_R).mean())])


def _sample(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    """Overwrites the logits."""
    with poisoned():
        return triton_sampling_ops().sample_rows(logits_RV, batch)


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    return torch.randn(num_rows, vocab_size, device=device) * _DEVIATION


def _greedy(num_rows: int, vocab_size: int) -> SamplingBatch:
    return SamplingBatch()


def _drawn(num_rows: int, vocab_size: int, top_p: float, top_k: int = 0) -> SamplingBatch:
    rng = np.random.default_rng(num_rows)
    return SamplingBatch(
        draws=Draws(
            rows_D=np.arange(num_rows),
            temperature_D=np.full(num_rows, 0.8),
            top_k_D=np.full(num_rows, top_k),
            top_p_D=np.full(num_rows, top_p),
            min_p_D=np.zeros(num_rows),
            uniform_D=rng.uniform(0.001, 0.999, num_rows),
        )
    )


def _penalized(num_rows: int, vocab_size: int) -> SamplingBatch:
    """Each row's every seventh token was generated once."""
    token_ids = np.arange(0, vocab_size, 7)
    rows_E = np.arange(num_rows)
    penalties = Penalties(
        tokens=RowTokens(
            rows_E,
            np.arange(num_rows + 1) * len(token_ids),
            np.tile(token_ids, num_rows),
        ),
        output_counts_P=np.ones(num_rows * len(token_ids), np.int64),
        repetition_E=np.full(num_rows, 1.3, np.float32),
        frequency_E=np.full(num_rows, 0.5),
        presence_E=np.full(num_rows, 0.5),
    )
    return SamplingBatch(penalties=penalties)


def _told(num_rows: int, vocab_size: int) -> SamplingBatch:
    return SamplingBatch(told=ToldRows(np.arange(num_rows), np.full(num_rows, 5)))
