"""Sampling: what each parameter does to a row, and that no row sees another."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.sampler import SampledToken, plan_sampling
from kernels.reference.token_filters import NUM_CANDIDATES
from kernels.sampling_ops import SamplingOps
from tests.sampling_backends import SAMPLING_BACKENDS, sampling_ops

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def request(
    params: SamplingParams = GREEDY,
    prompt: tuple[int, ...] = (5,),
    output: tuple[int, ...] = (),
    index: int = 0,
    stopping: StoppingCriteria | None = None,
) -> Request:
    made = Request("r", index, list(prompt), params, stopping or StoppingCriteria(max_tokens=100))
    for token_id in output:
        made.append_output(token_id)
    return made


class Sampler:
    """The sampler on one backend."""

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops

    def sample(
        self, logits: Tensor, requests: list[Request], bitmask: GrammarBitmask | None = None
    ) -> list[SampledToken]:
        planned = plan_sampling(requests, bitmask, logits.shape[1], self._ops)
        return planned.launch(logits.clone()).wait().tokens

    def token(self, logits: Tensor, params: SamplingParams, **kwargs: object) -> int:
        """The token of one row alone."""
        made = request(params, **kwargs)  # type: ignore[arg-type]
        (sampled,) = self.sample(logits.unsqueeze(0), [made])
        assert sampled.failure is None
        return sampled.token_id

    def draws(self, logits: Tensor, params: SamplingParams, count: int) -> list[int]:
        """As many tokens of one row, as samples of one request."""
        requests = [request(params, index=i) for i in range(count)]
        return [s.token_id for s in self.sample(logits.repeat(count, 1), requests)]


@pytest.fixture(params=SAMPLING_BACKENDS)
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    return Sampler(sampling_ops(request.param, monkeypatch))


def random_logits(rows: int = 1, scale: float = 2.0, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 77] = 1.0
    logits[1, [900, 400, 401]] = 5.0
    assert [s.token_id for s in sampler.sample(logits, [request()] * 3)] == [77, 400, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=1.5, top_k=1),
        SamplingParams(temperature=1.5, min_p=1.0),
    ],
)
def test_what_amounts_to_greedy_is_greedy(sampler: Sampler, params: SamplingParams) -> None:
    logits = random_logits()[0]
    logits[[321, 654]] = logits.max() + 1.0  # a tie
    assert sampler.token(logits, params) == 321


def test_small_temperatures_and_huge_logits_stay_finite(sampler: Sampler) -> None:
    logits = random_logits()[0]
    assert sampler.token(logits * 1e30, SamplingParams(temperature=1e-4)) == int(logits.argmax())
    assert sampler.token(logits, SamplingParams(temperature=1e-4, top_p=1e-9)) == int(
        logits.argmax()
    )


# ---------------------------------------------------------------- distributions


def total_variation(
    sampler: Sampler, logits: Tensor, params: SamplingParams, expected: Tensor
) -> float:
    count = 20_000
    tokens = sampler.draws(logits, params, count)
    seen = torch.bincount(torch.tensor(tokens), minlength=len(expected)) / count
    return float((seen - expected).abs().sum() / 2)


def expected_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The parameters' meaning, by a full sort and in float64."""
    p = (logits.double() / params.temperature).softmax(0)
    ranked = p.argsort(descending=True)
    if 0 < params.top_k < len(p):
        p[ranked[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        before = p[ranked].cumsum(0) - p[ranked]
        p[ranked[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.7),
        SamplingParams(temperature=2.0, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
def test_draws_follow_the_distribution(sampler: Sampler, params: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2)) * 1.5
    assert total_variation(sampler, logits, params, expected_distribution(logits, params)) < 0.02


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.0, top_k=NUM_CANDIDATES),
        SamplingParams(temperature=3.0, top_k=NUM_CANDIDATES + 1),
        SamplingParams(temperature=3.0, top_k=10**9),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=3.0, top_p=0.95),  # a nucleus wider than the candidates
        SamplingParams(temperature=3.0, top_k=600, top_p=0.9),
        SamplingParams(temperature=3.0, min_p=0.3),
        SamplingParams(temperature=1.0, top_p=0.9999999),
    ],
)
def test_what_is_filtered_is_never_drawn_and_the_rest_can_be(
    sampler: Sampler, params: SamplingParams
) -> None:
    logits = random_logits(scale=1.0)[0]
    allowed = set(expected_distribution(logits, params).nonzero().flatten().tolist())
    seen = set(sampler.draws(logits, params, 3000))
    assert seen <= allowed
    assert len(seen) > min(len(allowed), 400) * 0.6


def test_a_neighbours_wide_top_k_changes_no_nucleus(sampler: Sampler) -> None:
    logits = random_logits(2, scale=1.0)
    nucleus = SamplingParams(temperature=2.0, seed=9, top_p=0.5)
    wide = SamplingParams(temperature=2.0, seed=9, top_k=900)
    for index in range(200):
        mine = request(nucleus, index=index)
        alone = token_of(sampler.sample(logits[:1], [mine]))
        assert sampler.sample(logits, [mine, request(wide)])[0].token_id == alone


def test_top_k_keeps_equals_of_the_last_one_together(sampler: Sampler) -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[[10, 20, 30]] = 1.0
    assert set(sampler.draws(logits, SamplingParams(top_k=2), 200)) == {10, 20, 30}


def test_the_last_token_of_the_vocabulary_can_be_drawn_and_none_beyond(sampler: Sampler) -> None:
    logits = torch.full((VOCAB,), -100.0)
    logits[VOCAB - 1] = 0.0
    assert set(sampler.draws(logits, SamplingParams(temperature=1.0), 500)) == {VOCAB - 1}


# ---------------------------------------------------------------- seeds


def test_a_seed_gives_its_tokens_in_any_company(sampler: Sampler) -> None:
    kinds = [
        SamplingParams(temperature=0.9, seed=42),
        SamplingParams(temperature=1.4, seed=42, top_p=0.8),
        SamplingParams(temperature=3.0, seed=7, top_p=0.97),  # sorted whole
        SamplingParams(temperature=1.1, seed=2**64 - 1, top_k=20, min_p=0.01),
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
    ]
    requests = [
        request(params, output=tuple(range(position)), index=position % 2)
        for params in kinds
        for position in range(6)
    ]
    logits = random_logits(len(requests))
    alone = [token_of(sampler.sample(logits[i : i + 1], [r])) for i, r in enumerate(requests)]
    together = [s.token_id for s in sampler.sample(logits, requests)]
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = sampler.sample(logits[order], [requests[i] for i in order])
    assert together == alone
    assert [s.token_id for s in shuffled] == [alone[i] for i in order]


def token_of(sampled: list[SampledToken]) -> int:
    (one,) = sampled
    return one.token_id


def test_seed_sample_and_position_each_matter(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    params = SamplingParams(temperature=1.0, seed=1)
    base = sampler.token(logits, params)
    assert sampler.token(logits, params) == base
    assert sampler.token(logits, SamplingParams(temperature=1.0, seed=2)) != base
    assert sampler.token(logits, params, index=1) != base
    assert sampler.token(logits, params, output=(1,)) != base
    assert len(set(sampler.draws(logits, params, 50))) > 40


# ---------------------------------------------------------------- penalties, bias, ends


def test_repetition_penalty_covers_prompt_and_output_once_each(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12]] = torch.tensor([4.0, 3.5, 3.0])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.25)
    assert sampler.token(logits, params, prompt=(10, 10, 10)) == 11  # 4 / 1.25 = 3.2
    assert sampler.token(logits, params, prompt=(10,), output=(11,)) == 10  # 3.2, 2.8, 3.0
    negative = torch.full((VOCAB,), -10.0)
    negative[[10, 11]] = torch.tensor([-1.0, -1.2])
    assert sampler.token(negative, params, prompt=(10,)) == 11  # -1.25 against -1.2


def test_frequency_and_presence_count_the_output_only(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 11]] = torch.tensor([4.0, 3.0])
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.4)
    assert sampler.token(logits, frequency, prompt=(10,) * 9) == 10
    assert sampler.token(logits, frequency, output=(10, 10)) == 10  # 4 - 0.8
    assert sampler.token(logits, frequency, output=(10, 10, 10)) == 11  # 4 - 1.2
    presence = SamplingParams(temperature=0.0, presence_penalty=1.5)
    assert sampler.token(logits, presence, prompt=(10,) * 9) == 10
    assert sampler.token(logits, presence, output=(10,)) == 11
    negative = SamplingParams(temperature=0.0, presence_penalty=-1.5)
    assert sampler.token(logits, negative, output=(11, 11)) == 11


def test_logit_bias_is_added(sampler: Sampler) -> None:
    logits = random_logits()[0]
    assert sampler.token(logits, SamplingParams(temperature=0.0, logit_bias={123: 100.0})) == 123
    best = int(logits.argmax())
    assert sampler.token(logits, SamplingParams(temperature=0.0, logit_bias={best: -100.0})) != best
    drawn = sampler.draws(logits, SamplingParams(temperature=1.0, logit_bias={123: 100.0}), 20)
    assert set(drawn) == {123}


@pytest.mark.parametrize("ends", [{"eos_token_ids": (2, 3)}, {"stop_token_ids": (2, 3)}])
def test_min_tokens_masks_every_end_until_reached(
    sampler: Sampler, ends: dict[str, tuple[int, ...]]
) -> None:
    logits = torch.zeros(VOCAB)
    logits[[2, 3, 40]] = torch.tensor([9.0, 8.0, 1.0])
    stopping = StoppingCriteria(max_tokens=9, min_tokens=2, **ends)
    assert sampler.token(logits, GREEDY, stopping=stopping) == 40
    assert sampler.token(logits, GREEDY, stopping=stopping, output=(40,)) == 40
    assert sampler.token(logits, GREEDY, stopping=stopping, output=(40, 40)) == 2


def test_counting_as_the_text_grows_equals_counting_it_whole(sampler: Sampler) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2
    )
    logits = random_logits(scale=1.0)
    made = request(params, prompt=(3, 3, 9))
    generator = torch.Generator().manual_seed(4)
    for step in range(60):
        expected = logits[0].double()
        for token_id in {*made.token_ids}:
            value = expected[token_id]
            expected[token_id] = value / 1.3 if value > 0 else value * 1.3
            count = made.output_token_ids.count(token_id)
            expected[token_id] -= 0.3 * count + 0.2 * (count > 0)
        (got,) = sampler.sample(logits, [made])
        assert got.token_id == int(expected.argmax()), step
        made.append_output(int(torch.randint(30, (1,), generator=generator)))


def test_penalties_of_each_row_are_its_own(sampler: Sampler) -> None:
    logits = random_logits(4, scale=1.0)
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=1.9),
        GREEDY,
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=-2.0),
    ]
    best = logits.topk(3).indices.tolist()
    requests = [
        request(params, prompt=(ids[0],), output=(ids[0], ids[1]))
        for params, ids in zip(kinds, best, strict=True)
    ]
    alone = [token_of(sampler.sample(logits[i : i + 1], [r])) for i, r in enumerate(requests)]
    assert [s.token_id for s in sampler.sample(logits, requests)] == alone
    assert alone[1] == best[1][0]


def test_only_allowed_tokens_are_left(sampler: Sampler) -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(900, 3, 17))
    got = sampler.sample(logits, [request(params), request()])
    assert got[0].token_id == max((900, 3, 17), key=lambda i: float(logits[0, i]))
    assert got[1].token_id == int(logits[1].argmax())
    hot = SamplingParams(temperature=2.0, allowed_token_ids=(900, 3, 17))
    assert set(sampler.draws(logits[0], hot, 200)) == {900, 3, 17}


def test_a_bad_sequence_is_never_completed(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12]] = torch.tensor([5.0, 4.0, 3.0])
    bad = SamplingParams(temperature=0.0, bad_token_sequences=((10,), (7, 8, 11)))
    assert sampler.token(logits, bad) == 11
    assert sampler.token(logits, bad, output=(7, 8)) == 12
    assert sampler.token(logits, bad, output=(1, 7, 8)) == 12
    assert sampler.token(logits, bad, output=(8,)) == 11
    assert sampler.token(logits, bad, output=(7, 8, 9)) == 11
    assert sampler.token(logits, bad, prompt=(7, 8)) == 11  # what was asked is not what is said
    got = sampler.sample(logits.repeat(2, 1), [request(bad), request()])
    assert [s.token_id for s in got] == [11, 10]


def bitmask(rows: list[int], allowed: list[set[int]]) -> GrammarBitmask:
    words = torch.zeros(len(rows), -(-VOCAB // 32), dtype=torch.int32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= torch.tensor(1 << (i % 32)).to(torch.int32)
    return GrammarBitmask(rows, words)


def test_grammar_mask_binds_its_rows_only_and_beats_bias(sampler: Sampler) -> None:
    logits = random_logits(3)
    biased = SamplingParams(temperature=0.0, logit_bias={5: 100.0})
    mask = bitmask([1], [{7, 8, 9}])
    got = sampler.sample(logits, [request(), request(biased), request(biased)], mask)
    assert got[0].token_id == int(logits[0].argmax())
    assert got[1].token_id in {7, 8, 9}
    assert got[2].token_id == 5


def test_min_tokens_gives_way_where_the_grammar_allows_only_an_end(sampler: Sampler) -> None:
    stopping = StoppingCriteria(max_tokens=9, min_tokens=5, eos_token_ids=(2,))
    made = request(stopping=stopping)
    assert sampler.sample(random_logits(), [made], bitmask([0], [{2}]))[0].token_id == 2
    assert sampler.sample(random_logits(), [made], bitmask([0], [{2, 7}]))[0].token_id == 7


def test_min_tokens_gives_way_in_its_own_row_only(sampler: Sampler) -> None:
    stopping = StoppingCriteria(max_tokens=9, min_tokens=5, eos_token_ids=(2,))
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 9.0
    logits[:, 8] = 1.0
    only_end = SamplingParams(temperature=0.0, allowed_token_ids=(2,))
    got = sampler.sample(logits, [request(only_end, stopping=stopping), request(stopping=stopping)])
    assert [s.token_id for s in got] == [2, 8]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, num_logprobs=2)])
def test_a_row_that_is_not_finite_fails_alone(
    sampler: Sampler, bad: float, params: SamplingParams
) -> None:
    logits = random_logits(3)
    expected = [s.token_id for s in sampler.sample(logits, [request(params)] * 3)]
    logits[1, 17] = bad
    got = sampler.sample(logits, [request(params)] * 3)
    assert got[1].failure is not None
    assert got[1].failure.reason == "INTERNAL_ERROR"
    assert [got[0].token_id, got[2].token_id] == [expected[0], expected[2]]
    assert got[0].failure is None
    assert got[2].failure is None


def test_large_but_finite_logits_are_no_failure(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), 3e38)  # the sum overflows
    assert sampler.sample(logits, [request()])[0].failure is None


def test_a_row_without_an_allowed_token_fails_alone(sampler: Sampler) -> None:
    got = sampler.sample(
        random_logits(2),
        [request(SamplingParams(temperature=1.0)), request()],
        bitmask([0], [set()]),
    )
    assert got[0].failure is not None
    assert got[0].failure.reason == "INVALID_VALUE"  # the caller's doing, not a fault of ours
    assert got[1].failure is None


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_the_raw_models(sampler: Sampler) -> None:
    logits = random_logits(4)
    want = logits.log_softmax(-1)
    forced = int(logits[1].argmin())
    requests = [
        request(SamplingParams(temperature=0.0, num_logprobs=3)),
        request(SamplingParams(temperature=0.7, logit_bias={forced: 100.0}, num_logprobs=0)),
        request(GREEDY),
        request(SamplingParams(temperature=1.0, top_k=1, num_logprobs=20)),
    ]
    got = sampler.sample(logits, requests)
    assert got[2].logprobs is None
    first, second, last = got[0].logprobs, got[1].logprobs, got[3].logprobs
    assert first is not None
    assert second is not None
    assert last is not None
    ranked = want[0].argsort(descending=True).tolist()
    assert first.rank == 1
    assert first.top_token_ids == ranked[:3]
    assert first.logprob == pytest.approx(float(want[0].max()))
    assert first.top_logprobs == pytest.approx(want[0][ranked[:3]].tolist())
    assert (second.rank, second.top_token_ids, second.top_logprobs) == (VOCAB, [], [])
    assert second.logprob == pytest.approx(float(want[1].min()))
    assert len(last.top_token_ids) == 20
    assert last.top_logprobs == sorted(last.top_logprobs, reverse=True)
    assert sum(math.exp(p) for p in last.top_logprobs) <= 1 + 1e-3
    assert max(last.top_logprobs) <= 0


def test_logprobs_stay_finite_under_a_grammar_mask(sampler: Sampler) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=5)
    (got,) = sampler.sample(random_logits(), [request(params)], bitmask([0], [{999}]))
    assert got.logprobs is not None
    assert got.token_id == 999
    assert all(math.isfinite(p) for p in [got.logprobs.logprob, *got.logprobs.top_logprobs])


def test_sampling_does_not_touch_requests(sampler: Sampler) -> None:
    made = request(SamplingParams(temperature=1.0, frequency_penalty=1.0), output=(3, 3))
    before = dataclasses.astuple(made)
    sampler.sample(random_logits(), [made])
    assert dataclasses.astuple(made) == before
