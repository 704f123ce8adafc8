"""Sampling in Triton: the split form, what it refuses, and rows that take its rarer ways.

What it shares with all backends is in test_kernels_sampling.py.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.array_places import upload
from kernels.sampling_batch import (
    Draws,
    GivenTokens,
    RowStatus,
    SampledRows,
    SamplingBatch,
    TokenMask,
    ToldRows,
)
from kernels.sampling_ops import SamplingOps, reference_sampling_ops, triton_sampling_ops
from tests.kernels.test_kernels_sampling import (
    FILTERS,
    check_draw,
    draws,
    mixed_batch,
    random_logits,
    row_of,
    row_tokens,
    sample,
    told_bits,
)
from tests.sampling_backends import sampling_ops


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    return sampling_ops("triton", monkeypatch)


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """Its numpy would warn where a GPU's float becomes infinite."""
    with np.errstate(all="ignore"):
        yield


def draw(top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0, row: int = 0) -> Draws:
    return Draws(
        np.array([row]),
        np.array([temperature]),
        np.array([top_k]),
        np.array([top_p]),
        np.array([0.0]),
        np.array([0.37]),
    )


# ---------------------------------------------------------------- a row is its own


def test_a_mixed_step_is_the_references_and_each_row_the_same_alone(ops: SamplingOps) -> None:
    num_rows = 13
    logits_RV, batch = mixed_batch(num_rows, 333)
    got = sample(ops, logits_RV, batch)
    expected = sample(reference_sampling_ops(), logits_RV, batch)
    assert got.token_ids_R.tolist() == expected.token_ids_R.tolist()
    assert not got.statuses_R.any()
    assert batch.told is not None
    for place, row in enumerate(batch.told.rows_L.tolist()):
        assert_tells_the_same(got, expected, place, int(batch.told.num_top_L[place]))
        alone = sample(ops, logits_RV[row : row + 1], row_of(batch, row))
        assert alone.token_ids_R[0] == got.token_ids_R[row]
        assert told_bits(alone)[0] == told_bits(got)[0][4 * place : 4 * place + 4]


def assert_tells_the_same(
    got: SampledRows, expected: SampledRows, place: int, num_top: int
) -> None:
    ours, theirs = got.logprobs, expected.logprobs
    assert ours is not None
    assert theirs is not None
    assert ours.logprobs_L[place] == pytest.approx(theirs.logprobs_L[place], abs=1e-5)
    assert ours.ranks_L[place] == theirs.ranks_L[place]
    top = slice(0, num_top)
    assert (
        ours.top_token_ids_LN[place, top].tolist() == theirs.top_token_ids_LN[place, top].tolist()
    )
    np.testing.assert_allclose(
        ours.top_logprobs_LN[place, top], theirs.top_logprobs_LN[place, top], atol=1e-5
    )


def test_the_order_of_rows_changes_no_bit(ops: SamplingOps) -> None:
    num_rows = 5
    logits_RV, forwards = random_logits(num_rows, 700), draws(num_rows)
    told = ToldRows(np.arange(num_rows), np.full(num_rows, 4))
    backwards = forwards[np.arange(num_rows)[::-1].copy()]
    backwards = dataclasses.replace(backwards, rows_D=np.arange(num_rows))
    got = sample(ops, logits_RV, SamplingBatch(draws=forwards, told=told))
    turned = sample(ops, logits_RV.flip(0), SamplingBatch(draws=backwards, told=told))
    assert got.token_ids_R.tolist() == turned.token_ids_R[::-1].tolist()
    assert got.logprobs is not None
    assert turned.logprobs is not None
    assert got.logprobs.logprobs_L.tobytes() == turned.logprobs.logprobs_L[::-1].tobytes()
    assert np.array_equal(got.logprobs.top_logprobs_LN, turned.logprobs.top_logprobs_LN[::-1])


# ---------------------------------------------------------------- the split form


def test_tokens_are_on_the_device_before_the_host_waits(device: torch.device) -> None:
    from kernels.triton.sampling import plan_sampling

    logits_RV = random_logits(4, 300)
    logits_RV[2, 7] = torch.nan
    told = ToldRows(np.array([1]), np.array([2]))
    batch = SamplingBatch(draws=draws(4), told=told)
    expected = reference_sampling_ops().sample_rows(logits_RV.clone(), batch)
    on_device = logits_RV.to(device)
    planned = plan_sampling(batch, (), 4, 300)
    params = upload(planned.arrays, device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        pending = planned.launch(on_device, params)
        next_inputs_R = pending.token_ids_R + 1
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    got = pending.wait()
    assert got.statuses_R.tolist() == [0, 0, RowStatus.NOT_FINITE, 0]
    assert got.token_ids_R[[0, 1, 3]].tolist() == expected.token_ids_R[[0, 1, 3]].tolist()
    assert got.token_ids_R[2] == 0  # no token, but an id that a next step can look up
    assert next_inputs_R.device.type == device.type
    assert next_inputs_R.dtype == torch.int64
    assert next_inputs_R.tolist() == (got.token_ids_R + 1).tolist()
    assert got.logprobs is not None
    assert got.logprobs.top_token_ids_LN.shape == (1, 2)


def test_what_is_planned_for_other_logits_is_refused(device: torch.device) -> None:
    from kernels.triton.sampling import plan_sampling

    planned = plan_sampling(SamplingBatch(), (), 2, 100)
    params = upload(planned.arrays, device)
    for shape in ((3, 100), (2, 101)):
        with pytest.raises(ValueError, match="for 2 rows of 100"):
            planned.launch(torch.zeros(shape, device=device), params)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_no_number_of_rows_has_kernels_compiled_anew(device: torch.device, num_rows: int) -> None:
    """For Triton a kernel is another one for each argument whose address is no multiple of 16."""
    from kernels.triton.sampling import plan_sampling
    from kernels.triton.sampling_results import ResultsBuffer

    given = [GivenTokens(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))] * 2
    params = upload(plan_sampling(mixed_batch(9, 100)[1], given, 9, 100).arrays, device)
    results = ResultsBuffer.empty(num_rows, [(num_rows, 3), (num_rows, 1)], device).results()
    told = [tensor for group in results.groups for tensor in group]
    tensors = [*params, results.token_ids_R, results.statuses_R, *told]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def test_a_step_without_rows_samples_none(ops: SamplingOps) -> None:
    got = ops.sample_rows(torch.empty(0, 50), SamplingBatch())
    assert got.token_ids_R.shape == got.statuses_R.shape == (0,)
    assert got.logprobs is None
    none = np.empty(0, np.int64)
    assert ops.token_logprobs(torch.empty(0, 50), none, none).ranks_L.shape == (0,)


def test_raw_logits_are_told_of_and_only_edited_rows_copied(ops: SamplingOps) -> None:
    logits_RV = random_logits(3, 60)
    best = int(logits_RV[1].argmax())
    told = ToldRows(np.arange(3), np.full(3, 1))
    got = sample(ops, logits_RV, SamplingBatch(banned=row_tokens({1: [best]}), told=told))
    assert got.token_ids_R[1] != best
    assert got.logprobs is not None
    assert got.logprobs.ranks_L.tolist() == [1, 2, 1]
    assert got.logprobs.top_token_ids_LN[1, 0] == best
    expected_R = logits_RV.double().log_softmax(dim=-1).numpy()[range(3), got.token_ids_R]
    np.testing.assert_allclose(got.logprobs.logprobs_L, expected_R, atol=1e-5)


# ---------------------------------------------------------------- exact cuts


def ladder(vocab_size: int, num_kept: int) -> Tensor:
    """[1, V], all about as likely at a temperature of 50. The last that stays is the last token,
    the first to go the first token, and token 1 the likeliest."""
    others = np.setdiff1d(np.arange(vocab_size), [0, num_kept - 1, num_kept])
    ranks_V = np.concatenate(([num_kept, 0], others, [num_kept - 1]))
    return torch.from_numpy(1.0 - ranks_V / vocab_size).float().unsqueeze(0)


def ends_of_kept(
    ops: SamplingOps, logits_1V: Tensor, top_k: int, top_p: float, temperature: float
) -> list[int]:
    """The first and the last token that filters leave."""
    ends = []
    for uniform in (2.0**-33, np.nextafter(1.0, 0.0)):
        filters = draw(top_k, top_p, temperature)
        batch = SamplingBatch(draws=dataclasses.replace(filters, uniform_D=np.array([uniform])))
        ends.append(int(sample(ops, logits_1V, batch).token_ids_R[0]))
    return ends


@pytest.mark.parametrize("vocab_size", [130, 20_000])
@pytest.mark.parametrize("is_crowd", [False, True])
@pytest.mark.parametrize("kind", ["top-k", "top-p", "both"])
def test_a_filter_cuts_between_two_tokens(
    ops: SamplingOps, vocab_size: int, is_crowd: bool, kind: str
) -> None:
    """In a crowd all share one bin; 20,000 are more than can be written out."""
    num_kept, temperature = vocab_size // 2, 50.0
    logits_1V = ladder(vocab_size, num_kept)
    if is_crowd:
        logits_1V[0, -2] = -100.0  # the least likely one: the bins become wide
    top_k = {"top-k": num_kept, "top-p": 0, "both": num_kept * 3 // 2}[kind]
    weights_V = (logits_1V[0].double() / temperature).exp().sort(descending=True).values
    weight_of_all = weights_V[: top_k or vocab_size].sum()
    halfway = weights_V[:num_kept].sum() - weights_V[num_kept - 1] / 2
    top_p = 1.0 if kind == "top-k" else float(halfway / weight_of_all)
    assert ends_of_kept(ops, logits_1V, top_k, top_p, temperature) == [1, vocab_size - 1]


def test_without_filters_all_tokens_are_drawn(ops: SamplingOps) -> None:
    for off in (0, 20_000, 2**32 + 1):
        assert ends_of_kept(ops, ladder(20_000, 7), off, 1.0, 50.0) == [0, 19_999]


def test_the_largest_logit_with_the_lowest_id_is_taken(ops: SamplingOps) -> None:
    logits_RV = torch.zeros(2, 20_000)
    logits_RV[0, [700, 700 + 8192, 700 + 2 * 8192]] = 3.0
    logits_RV[1, [9000, 12_000]] = 3.0
    assert sample(ops, logits_RV, SamplingBatch()).token_ids_R.tolist() == [700, 9000]


# ---------------------------------------------------------------- rarer ways


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e30, 1e300])
def test_what_is_masked_is_not_drawn_at_any_temperature(
    ops: SamplingOps, temperature: float
) -> None:
    logits_1V = random_logits(1, 64)
    words = torch.zeros(1, 2, dtype=torch.int32)
    words[0, 1] = 0b101  # tokens 32 and 34
    for filters in ({}, {"top_k": 10}, {"top_p": 0.99}):
        batch = SamplingBatch(
            mask=TokenMask(np.array([0]), words),
            draws=draw(temperature=temperature, **filters),
        )
        got = sample(ops, logits_1V, batch)
        assert got.statuses_R.tolist() == [RowStatus.SAMPLED]
        assert got.token_ids_R[0] in (32, 34)


@pytest.mark.slow
def test_a_vocabulary_of_128256(ops: SamplingOps) -> None:
    num_rows, vocab_size = len(FILTERS), 128_256
    logits_RV, all_draws = random_logits(num_rows, vocab_size), draws(num_rows)
    told = ToldRows(np.array([0, 5]), np.array([20, 3]))
    batch = SamplingBatch(draws=all_draws, told=told)
    got = sample(ops, logits_RV, batch)
    for row, token_id in enumerate(got.token_ids_R):
        check_draw(logits_RV[row].double().numpy(), all_draws[row : row + 1], token_id)
    assert got.logprobs is not None
    for place, row in enumerate(told.rows_L.tolist()):
        expected_V = logits_RV[row].double().log_softmax(dim=-1)
        token_id, num_top = int(got.token_ids_R[row]), int(told.num_top_L[place])
        assert got.logprobs.logprobs_L[place] == pytest.approx(
            float(expected_V[token_id]), abs=5e-6
        )
        top_ids = got.logprobs.top_token_ids_LN[place, :num_top].tolist()
        expected_ids = logits_RV[row].argsort(descending=True, stable=True)[:num_top]
        assert top_ids == expected_ids.tolist()


# ---------------------------------------------------------------- bad arguments


def test_what_is_not_a_batch_of_these_logits_is_refused(ops: SamplingOps) -> None:
    logits_RV = random_logits(3, 40)
    words = torch.zeros(1, 2, dtype=torch.int32)
    bad_batches = [
        SamplingBatch(banned=row_tokens({3: [1]})),
        SamplingBatch(banned=row_tokens({-1: [1]})),
        SamplingBatch(allowed=row_tokens({1: [40]})),
        SamplingBatch(early_ends=row_tokens({1: [2, -1]})),
        SamplingBatch(draws=draws(4)),
        SamplingBatch(told=ToldRows(np.array([5]), np.array([1]))),
        SamplingBatch(told=ToldRows(np.array([0]), np.array([41]))),
        SamplingBatch(mask=TokenMask(np.array([3]), words)),
        SamplingBatch(mask=TokenMask(np.array([0]), words[:, :1])),
        SamplingBatch(mask=TokenMask(np.array([0, 1]), words)),
    ]
    for batch in bad_batches:
        with pytest.raises(ValueError, match=r"not one of|can tell of"):
            ops.sample_rows(logits_RV, batch)
    with pytest.raises(ValueError, match="not one of"):
        ops.token_logprobs(logits_RV, np.array([0, 1, 40]), np.array([0, 0, 0]))
    with pytest.raises(ValueError, match="can tell of"):
        ops.token_logprobs(torch.zeros(1, 2000), np.array([0]), np.array([1025]))
    with pytest.raises(TypeError, match="int32"):
        ops.sample_rows(logits_RV, SamplingBatch(mask=TokenMask(np.array([0]), words.long())))


def test_what_are_no_logits_is_refused(device: torch.device) -> None:
    triton_ops = triton_sampling_ops()
    logits_RV = torch.zeros(3, 40, device=device)
    for bad_logits in (logits_RV.double(), logits_RV[:, ::2]):
        with pytest.raises(TypeError, match="float32 and contiguous"):
            triton_ops.sample_rows(bad_logits, SamplingBatch())
        with pytest.raises(TypeError, match="float32 and contiguous"):
            triton_ops.token_logprobs(bad_logits, np.zeros(3, np.int64), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="larger than"):
        triton_ops.sample_rows(torch.empty(0, 2**22 + 1, device=device), SamplingBatch())


# ---------------------------------------------------------------- the compiler

_COMPILE = """
import numpy as np, torch
from tests.kernels.hopper_compiler import compile_instead_of_launching

compiled = compile_instead_of_launching()
from kernels.triton.logprobs import _tell_rows
from kernels.triton.sampling import draw_rows, edit_rows, sample_rows
from kernels.sampling_batch import SamplingBatch, TokenMask, ToldRows
from tests.kernels.test_kernels_sampling import draws, mixed_batch

told = ToldRows(np.array([0]), np.array([1]))
sample_rows(torch.zeros(1, 1), SamplingBatch(draws=draws(1), told=told))
sample_rows(torch.zeros(9, 128_256), mixed_batch(9, 128_256)[1])
num_variants = lambda: [len(k.device_caches[0][0]) for k in (edit_rows, draw_rows, _tell_rows)]
before = num_variants()
for num_rows, num_told, num_top, num_words in ((1, 1, 1, 0), (2, 2, 2, 22), (3, 1, 5, 23)):
    mask = TokenMask(np.array([0]), torch.zeros(1, num_words, dtype=torch.int32))
    told = ToldRows(np.arange(num_told), np.full(num_told, num_top))
    batch = SamplingBatch(
        draws=draws(num_rows), told=told, mask=mask if num_words else None
    )
    sample_rows(torch.zeros(num_rows, 700), batch)
assert [now - then for now, then in zip(num_variants(), before)] == [1, 1, 1], num_variants()
print(*compiled)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="all tests compile them")
def test_all_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.split() == ["edit_rows", "draw_rows", "_tell_rows"] * 5
