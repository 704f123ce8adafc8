"""The sampling ops against float64 mathematics by a full sort, on sizes that fit nothing evenly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import set_num_threads
from kernels.reference.random_uniform import random_uniforms
from kernels.sampling_batch import (
    Biases,
    Draws,
    Floats,
    Penalties,
    RowStatus,
    RowTokens,
    SampledRows,
    SamplingBatch,
    TokenMask,
    ToldRows,
)
from kernels.sampling_ops import SamplingOps
from tests.sampling_backends import CPU_FORMS, SAMPLING_BACKENDS, sampling_ops

SLACK = 3e-5  # of a row's weight: float32 sums of tens of thousands of weights

# (temperature, top_k, top_p, min_p)
FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 0.9, 0.0),
    (2.0, 0, 0.95, 0.0),
    (1.0, 0, 0.999999, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 40, 0.8, 0.0),
    (2.0, 700, 1.0, 0.0),
    (2.0, 700, 0.9, 0.02),
    (1.0, 2999, 0.9, 0.0),
    (0.8, 10**9, 0.7, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1e-4, 0, 0.9, 0.0),
)


@pytest.fixture(params=SAMPLING_BACKENDS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    return sampling_ops(request.param, monkeypatch)


@pytest.fixture(params=CPU_FORMS)
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    return sampling_ops(request.param, monkeypatch)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Every third row in coarse steps, with crowds of equals."""
    generator = torch.Generator().manual_seed(seed)
    scale_R1 = torch.rand(num_rows, 1, generator=generator) * 4 + 0.01
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator) * scale_R1
    logits_RV[::3] = (logits_RV[::3] * 2).round() / 2
    return logits_RV


def draws(num_rows: int, seed: int = 0) -> Draws:
    filters = [FILTERS[row % len(FILTERS)] for row in range(num_rows)]
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    uniform_D = np.random.default_rng(seed).random(num_rows)
    return Draws(
        np.arange(num_rows),
        np.array(temperature, np.float64),
        np.array(top_k, np.int64),
        np.array(top_p, np.float64),
        np.array(min_p, np.float64),
        uniform_D,
    )


def row_tokens(token_ids: dict[int, list[int]]) -> RowTokens:
    lengths = [len(ids) for ids in token_ids.values()]
    return RowTokens(
        np.array(list(token_ids), np.int64),
        np.concatenate(([0], np.cumsum(lengths))),
        np.array([i for ids in token_ids.values() for i in ids], np.int64),
    )


def sample(ops: SamplingOps, logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    return ops.sample_rows(logits_RV.clone(), batch)


# ---------------------------------------------------------------- draws


def check_draw(logits_V: Floats, draw: Draws, token_id: int) -> None:
    """The draw stays and its share of the kept weights, in the order of ids, holds the uniform."""
    (temperature,), (top_k,), (top_p,) = draw.temperature_D, draw.top_k_D, draw.top_p_D
    weights_V = np.exp((logits_V - logits_V.max()) / temperature)
    order_V = np.argsort(-weights_V, kind="stable")
    k = top_k if 0 < top_k < len(logits_V) else len(logits_V)
    kth = logits_V[order_V[k - 1]]
    before = weights_V[logits_V > logits_V[token_id]].sum()  # what is likelier
    of_top_k = weights_V[order_V[:k]].sum()
    assert logits_V[token_id] >= kth
    assert before <= (top_p + SLACK) * of_top_k
    assert weights_V[token_id] >= draw.min_p_D[0] * (1 - SLACK)

    kept_V = (logits_V >= kth) & (weights_V >= draw.min_p_D[0])
    if top_p < 1.0:
        reached = np.cumsum(weights_V[order_V[:k]]) >= top_p * of_top_k
        kept_V &= logits_V >= logits_V[order_V[np.argmax(reached)]]
    share_V = np.where(kept_V, weights_V, 0.0) / weights_V[kept_V].sum()
    cumulative = share_V[:token_id].sum()
    uniform = draw.uniform_D[0]
    assert cumulative - SLACK <= uniform <= cumulative + share_V[token_id] + SLACK


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 8, 100, 127, 128, 129, 3000])
def test_draws_are_those_of_a_sort(ops: SamplingOps, vocab_size: int) -> None:
    num_rows = 10 * len(FILTERS)
    logits_RV, all_draws = random_logits(num_rows, vocab_size), draws(num_rows)
    if vocab_size > 2:
        logits_RV[::4, vocab_size // 2 : -1] -= 1e30  # next to nothing
    got = sample(ops, logits_RV, SamplingBatch(draws=all_draws))
    assert not got.statuses_R.any()
    for row, token_id in enumerate(got.token_ids_R):
        check_draw(logits_RV[row].double().numpy(), all_draws[row : row + 1], token_id)


@pytest.mark.parametrize("seed", range(3))
def test_draws_from_a_real_vocabulary(ops: SamplingOps, seed: int) -> None:
    num_rows = len(FILTERS)
    logits_RV, all_draws = random_logits(num_rows, 49_152, seed), draws(num_rows, seed)
    got = sample(ops, logits_RV, SamplingBatch(draws=all_draws))
    for row, token_id in enumerate(got.token_ids_R):
        check_draw(logits_RV[row].double().numpy(), all_draws[row : row + 1], token_id)


def test_uniforms_sweep_what_is_kept_from_the_first_id_to_the_last(ops: SamplingOps) -> None:
    logits_1V = random_logits(1, 3000, seed=5)
    order = logits_1V[0].argsort(descending=True, stable=True)
    kth = logits_1V[0, order[39]]
    kept = (logits_1V[0] >= kth).nonzero().flatten().tolist()
    tiny = 2.0**-33
    for uniform, expected in ((tiny, kept[0]), (1 - tiny, kept[-1])):
        draw = Draws(
            np.array([0]),
            np.array([50.0]),  # all about as likely
            np.array([40]),
            np.array([1.0]),
            np.array([0.0]),
            np.array([uniform]),
        )
        assert sample(ops, logits_1V, SamplingBatch(draws=draw)).token_ids_R.tolist() == [expected]


def test_all_equal_and_nothing_but_one(ops: SamplingOps) -> None:
    num_rows = len(FILTERS)
    crowd_RV = torch.full((num_rows, 500), 7.5)
    got = sample(ops, crowd_RV, SamplingBatch(draws=draws(num_rows)))
    uniform_D = draws(num_rows).uniform_D
    assert np.abs(got.token_ids_R - np.floor(uniform_D * 500)).max() <= 1
    alone_RV = torch.full((num_rows, 500), -torch.inf)
    alone_RV[:, 321] = -1e38
    mask = TokenMask(np.arange(num_rows), torch.zeros(num_rows, 16, dtype=torch.int32))
    mask.words_GW[:, 10] = 2  # token 321
    batch = SamplingBatch(mask=mask, draws=draws(num_rows))
    got = sample(ops, alone_RV.nan_to_num(neginf=-2e38), batch)
    assert set(got.token_ids_R) == {321}


# ---------------------------------------------------------------- a row is its own


def mixed_batch(num_rows: int, vocab_size: int) -> tuple[Tensor, SamplingBatch]:
    generator = np.random.default_rng(7)

    def some_tokens(rows: range, count: int) -> RowTokens:
        return row_tokens({row: generator.permutation(vocab_size)[:count].tolist() for row in rows})

    counted, biased = some_tokens(range(0, num_rows, 2), 60), some_tokens(range(1, num_rows, 3), 9)
    num_counted = len(counted.rows_E)
    words = torch.from_numpy(
        generator.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), np.int32)
    )
    return random_logits(num_rows, vocab_size), SamplingBatch(
        penalties=Penalties(
            counted,
            generator.integers(0, 3, len(counted.token_ids_P)),
            np.linspace(0.8, 1.5, num_counted, dtype=np.float32),
            np.linspace(-1, 1, num_counted),
            np.linspace(1, -1, num_counted),
        ),
        biases=Biases(biased, generator.normal(size=len(biased.token_ids_P)).astype(np.float32)),
        allowed=some_tokens(range(4, num_rows, 5), 300),
        banned=some_tokens(range(5, num_rows, 7), 40),
        mask=TokenMask(np.array([2, 3, num_rows - 1]), words),
        early_ends=some_tokens(range(1, num_rows, 4), 3),
        draws=draws(num_rows)[np.arange(0, num_rows, 1)[np.arange(num_rows) % 3 > 0]],
        told=ToldRows(np.arange(1, num_rows, 2), np.arange(1, num_rows, 2) % 6),
    )


def row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    """What a batch of that row alone asks."""
    penalties, biases, told = None, None, None
    if batch.penalties is not None and (found := entry_of(batch.penalties.tokens, row)):
        entry, pairs = found
        penalties = Penalties(
            alone(batch.penalties.tokens, pairs),
            batch.penalties.output_counts_P[pairs],
            batch.penalties.repetition_E[entry],
            batch.penalties.frequency_E[entry],
            batch.penalties.presence_E[entry],
        )
    if batch.biases is not None and (found := entry_of(batch.biases.tokens, row)):
        biases = Biases(alone(batch.biases.tokens, found[1]), batch.biases.biases_P[found[1]])
    assert batch.mask is not None
    assert batch.draws is not None
    assert batch.told is not None
    masked = batch.mask.rows_G == row
    drawn = batch.draws[batch.draws.rows_D == row]
    if row in batch.told.rows_L:
        told = ToldRows(np.array([0]), batch.told.num_top_L[batch.told.rows_L == row])
    return SamplingBatch(
        penalties=penalties,
        biases=biases,
        allowed=list_of(batch.allowed, row),
        banned=list_of(batch.banned, row),
        mask=TokenMask(np.array([0]), batch.mask.words_GW[masked]) if masked.any() else None,
        early_ends=list_of(batch.early_ends, row),
        draws=dataclasses.replace(drawn, rows_D=np.array([0])) if len(drawn.rows_D) else None,
        told=told,
    )


def entry_of(tokens: RowTokens, row: int) -> tuple[slice, slice] | None:
    """Of a row: its entry, and its pairs."""
    if row not in tokens.rows_E:
        return None
    entry = int(np.searchsorted(tokens.rows_E, row))
    return slice(entry, entry + 1), slice(tokens.starts_E1[entry], tokens.starts_E1[entry + 1])


def alone(tokens: RowTokens, pairs: slice) -> RowTokens:
    return row_tokens({0: tokens.token_ids_P[pairs].tolist()})


def list_of(tokens: RowTokens | None, row: int) -> RowTokens | None:
    found = None if tokens is None else entry_of(tokens, row)
    return None if tokens is None or found is None else alone(tokens, found[1])


def told_bits(sampled: SampledRows) -> list[bytes]:
    assert sampled.logprobs is not None
    return [
        getattr(sampled.logprobs, f.name).tobytes() for f in dataclasses.fields(sampled.logprobs)
    ]


@pytest.mark.parametrize("vocab_size", [333, 4000])
def test_a_row_is_the_same_alone_and_in_any_batch(ops: SamplingOps, vocab_size: int) -> None:
    num_rows = 39
    logits_RV, batch = mixed_batch(num_rows, vocab_size)
    together = sample(ops, logits_RV, batch)
    assert not together.statuses_R.any()
    assert together.logprobs is not None
    assert batch.told is not None
    for row in range(num_rows):
        mine = sample(ops, logits_RV[row : row + 1], row_of(batch, row))
        assert mine.token_ids_R[0] == together.token_ids_R[row]
        if mine.logprobs is None:
            continue
        (place,) = (batch.told.rows_L == row).nonzero()[0]
        num_top = batch.told.num_top_L[place]
        for field in dataclasses.fields(mine.logprobs):
            value = getattr(mine.logprobs, field.name)[0]
            among = getattr(together.logprobs, field.name)[place]
            assert np.array_equal(value, among[:num_top] if among.ndim else among)


def test_threads_change_nothing(cpu_ops: SamplingOps) -> None:
    logits_RV, batch = mixed_batch(39, 4000)
    seen = []
    try:
        for num_threads in (1, 2, 3):
            set_num_threads(num_threads)
            got = sample(cpu_ops, logits_RV, batch)
            seen.append((got.token_ids_R.tolist(), got.statuses_R.tolist(), told_bits(got)))
    finally:
        set_num_threads(1)
    assert seen[0] == seen[1] == seen[2]


def test_all_backends_agree_but_for_rounding(cpu_ops: SamplingOps) -> None:
    reference = sampling_ops("reference", pytest.MonkeyPatch())
    logits_RV, batch = mixed_batch(39, 4000)
    ours, theirs = sample(cpu_ops, logits_RV, batch), sample(reference, logits_RV, batch)
    assert ours.token_ids_R.tolist() == theirs.token_ids_R.tolist()
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    np.testing.assert_allclose(ours.logprobs.logprobs_L, theirs.logprobs.logprobs_L, atol=1e-4)
    assert ours.logprobs.ranks_L.tolist() == theirs.logprobs.ranks_L.tolist()


# ---------------------------------------------------------------- edits


@pytest.mark.parametrize("vocab_size", [45, 1000])
def test_edits_are_made_in_their_order(ops: SamplingOps, vocab_size: int) -> None:
    """On small whole numbers and halves, so that float32 is exact."""
    generator = np.random.default_rng(vocab_size)
    num_rows = 60
    logits_RV = torch.from_numpy(generator.integers(-6, 7, (num_rows, vocab_size)) / 2).float()

    def lists(step: int, count: int) -> dict[int, list[int]]:
        rows = range(step - 1, num_rows, step)
        return {row: generator.permutation(vocab_size)[:count].tolist() for row in rows}

    counted, biased, allowed = lists(2, 20), lists(3, 10), lists(5, 30)
    banned, ends = lists(4, 10), lists(3, 4)
    counts = {row: generator.integers(0, 3, len(ids)) for row, ids in counted.items()}
    biases = {row: generator.integers(-4, 5, len(ids)) / 2 for row, ids in biased.items()}
    allowed_bits = generator.random((2, 32 * -(-vocab_size // 32))) < 0.4
    packed = np.packbits(allowed_bits, axis=1, bitorder="little").view(np.int32)
    masked = {7: 0, 11: 1}
    num_counted = len(counted)
    got = sample(
        ops,
        logits_RV,
        SamplingBatch(
            penalties=Penalties(
                row_tokens(counted),
                np.concatenate(list(counts.values())),
                np.full(num_counted, 2.0, np.float32),
                np.full(num_counted, 0.5),
                np.full(num_counted, 1.0),
            ),
            biases=Biases(
                row_tokens(biased), np.concatenate(list(biases.values())).astype(np.float32)
            ),
            allowed=row_tokens(allowed),
            banned=row_tokens(banned),
            mask=TokenMask(np.array(list(masked)), torch.from_numpy(packed)),
            early_ends=row_tokens(ends),
        ),
    )
    for row in range(num_rows):
        expected = logits_RV[row].double().numpy().copy()
        for token_id, count in zip(counted.get(row, []), counts.get(row, []), strict=True):
            value = expected[token_id]
            value = value / 2 if value > 0 else value * 2
            expected[token_id] = value - 0.5 * count - (count > 0)
        for token_id, bias in zip(biased.get(row, []), biases.get(row, []), strict=True):
            expected[token_id] += bias
        if row in allowed:
            expected[np.setdiff1d(np.arange(vocab_size), allowed[row])] = -np.inf
        expected[banned.get(row, [])] = -np.inf
        if row in masked:
            expected[~allowed_bits[masked[row], :vocab_size]] = -np.inf
        with_ends = expected.copy()
        expected[ends.get(row, [])] = -np.inf
        if np.isneginf(expected).all():
            expected = with_ends
        assert got.token_ids_R[row] == int(expected.argmax()), row


def test_lists_may_name_a_token_twice(ops: SamplingOps) -> None:
    logits_RV = random_logits(2, 20)
    logits_RV[:, 4] = 50.0
    twice = [4, 4, *range(10, 20), 4]
    kept = sample(ops, logits_RV, SamplingBatch(allowed=row_tokens({0: twice})))
    assert kept.token_ids_R.tolist() == [4, 4]
    ends = row_tokens({0: [4, 4], 1: list(range(20)) * 3})
    left = sample(ops, logits_RV, SamplingBatch(early_ends=ends))
    assert left.token_ids_R[0] != 4
    assert left.token_ids_R[1] == 4  # nothing but ends: they stay


def test_statuses_say_what_is_wrong_with_a_row(ops: SamplingOps) -> None:
    logits_RV = random_logits(6, 300)
    logits_RV[1, 299] = torch.nan
    logits_RV[2, 0] = -torch.inf
    logits_RV[3, 7] = torch.inf
    penalties = Penalties(
        row_tokens({5: [3]}), np.array([0]), np.array([1e-40], np.float32), np.zeros(1), np.zeros(1)
    )
    logits_RV[5, 3] = 9.0
    got = sample(
        ops,
        logits_RV,
        SamplingBatch(
            penalties=penalties,
            banned=row_tokens({4: list(range(300))}),
            draws=draws(6),
            told=ToldRows(np.arange(6), np.full(6, 2)),
        ),
    )
    assert got.statuses_R.tolist() == [
        RowStatus.SAMPLED,
        RowStatus.NOT_FINITE,
        RowStatus.NOT_FINITE,
        RowStatus.NOT_FINITE,
        RowStatus.NOTHING_ALLOWED,
        RowStatus.OVERFLOWS,
    ]
    assert (
        got.token_ids_R[0] == sample(ops, logits_RV[:1], SamplingBatch(draws=draws(1))).token_ids_R
    )


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize("vocab_size", [1, 50, 129, 5000])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_logprobs_are_those_of_float64(ops: SamplingOps, vocab_size: int, scale: float) -> None:
    num_rows = 20
    logits_LV = random_logits(num_rows, vocab_size, seed=9) * scale
    token_ids_L = np.random.default_rng(1).integers(0, vocab_size, num_rows)
    num_top_L = np.minimum(np.arange(num_rows) * 3, vocab_size)
    told = ops.token_logprobs(logits_LV, token_ids_L, num_top_L)
    expected_LV = logits_LV.double().log_softmax(dim=-1).numpy()
    for row, token_id in enumerate(token_ids_L):
        expected_V, num_top = expected_LV[row], num_top_L[row]
        assert told.logprobs_L[row] == pytest.approx(expected_V[token_id], rel=1e-5, abs=1e-4)
        likelier = int((logits_LV[row] > logits_LV[row, token_id]).sum())
        assert told.ranks_L[row] == likelier + 1
        top_ids = told.top_token_ids_LN[row, :num_top]
        assert len(set(top_ids)) == num_top
        assert expected_V[top_ids].tolist() == sorted(expected_V, reverse=True)[:num_top]
        np.testing.assert_allclose(
            told.top_logprobs_LN[row, :num_top], expected_V[top_ids], rtol=1e-5, atol=1e-4
        )


def test_equals_are_told_of_in_the_order_of_ids(ops: SamplingOps) -> None:
    logits_1V = torch.zeros(1, 1000)
    logits_1V[0, [900, 30]] = 1.0
    logits_1V[0, 1] = -0.0
    told = ops.token_logprobs(logits_1V, np.array([0]), np.array([5]))
    assert told.top_token_ids_LN.tolist() == [[30, 900, 0, 1, 2]]


def test_a_row_that_is_not_finite_has_no_logprob(ops: SamplingOps) -> None:
    logits_LV = random_logits(4, 200)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits_LV[row, 150] = bad
    told = ops.token_logprobs(logits_LV, np.array([3, 3, 3, 3]), np.array([1, 1, 1, 1]))
    assert np.isnan(told.logprobs_L).tolist() == [True, True, True, False]


# ---------------------------------------------------------------- random numbers


def test_uniforms_have_the_same_bits_on_every_backend(cpu_ops: SamplingOps) -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x299F31D0A4093822, 7], np.uint64)
    indices, positions = np.array([0, 3, 2**32 - 1, 0x85A308D3, 1]), np.array([0, 9, 5, 77, 2**40])
    got = cpu_ops.random_uniforms(seeds, indices, positions)
    assert got.tobytes() == random_uniforms(seeds, indices, positions).tobytes()


# ---------------------------------------------------------------- bad arguments


def test_what_is_not_a_batch_of_these_logits_is_refused(cpu_ops: SamplingOps) -> None:
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
    before = logits_RV.clone()
    for batch in bad_batches:
        with pytest.raises(ValueError, match=r"not one of|can tell of"):
            cpu_ops.sample_rows(logits_RV, batch)
    assert torch.equal(logits_RV, before)
    with pytest.raises(ValueError, match="not one of"):
        cpu_ops.token_logprobs(logits_RV, np.array([0, 1, 40]), np.array([0, 0, 0]))
    for bad_logits in (logits_RV.double(), logits_RV[:, ::2]):
        with pytest.raises(TypeError, match="float32 and contiguous"):
            cpu_ops.sample_rows(bad_logits, SamplingBatch())
    with pytest.raises(TypeError, match="int32"):
        cpu_ops.sample_rows(logits_RV, SamplingBatch(mask=TokenMask(np.array([0]), words.long())))
