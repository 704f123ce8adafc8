"""Every way to the same tokens: each path through the cache, each chunking, alone and in company.

    path      cold, whole blocks found, part of a block found too, evicted and computed again,
              preempted
    budget    tokens of a step: prompts are cut into chunks of at most that many
    company   targets one after the other, or all at once with neighbours

With the CPU kernels, in every quantization, and with the reference's batch-invariant ops tokens
and logprobs are the same to the last bit. With the reference's plain ones tokens are the same but
where the two best lie closer than NEAR_TIE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.messages import SamplingParams, StoppingCriteria, TokenLogprobs
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from tests.conftest import MakeTinyModel
from tests.engine_loop import LARGE_STEPS, EngineLoop

BLOCK_SIZE = 16
BUDGETS = (16, 50, 256)
NUM_NEW = 40
NEAR_TIE = 1e-3  # difference of the two best logprobs
NUM_BLOCKS = 256
VOCAB_SIZE = 800  # of the tiny models


def tokens(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Target:
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int = NUM_NEW


TARGETS = (
    Target(tokens(1, 33), SamplingParams(temperature=0.0, num_logprobs=2)),
    Target(tokens(2, 90), SamplingParams(temperature=0.9, top_p=0.95, seed=7, num_logprobs=2)),
    Target(
        tokens(3, 150),
        SamplingParams(temperature=0.0, frequency_penalty=0.6, num_logprobs=2),
    ),
)
NEIGHBOURS = tuple(
    Target(tokens(10 + i, length), SamplingParams(temperature=1.0, seed=i))
    for i, length in enumerate((1, 40, 70))
)
GROWING = tuple(
    Target(tokens(20 + i, 9), SamplingParams(temperature=1.0, seed=i), max_tokens=70)
    for i in range(4)
)


@dataclass(frozen=True)
class Outcome:
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Bench:
    """One loop, with its own prefix cache, over a runner that all share."""

    def __init__(self, runner: ModelRunner, budget: int, num_blocks: int = NUM_BLOCKS) -> None:
        self._loop = EngineLoop(runner, BLOCK_SIZE, budget, num_blocks=num_blocks)
        self._count = 0

    @property
    def num_preemptions(self) -> int:
        return self._loop.num_preemptions

    def run(self, targets: Sequence[Target]) -> tuple[list[Outcome], list[int]]:
        """All at once: their outcomes, and how many tokens of each were found in the cache."""
        requests = []
        for target in targets:
            self._count += 1
            stopping = StoppingCriteria(max_tokens=target.max_tokens)
            requests.append(
                Request(f"r{self._count}", 0, list(target.prompt), target.sampling, stopping)
            )
        logprobs: dict[str, list[TokenLogprobs]] = {r.request_id: [] for r in requests}
        for output in self._loop.run(requests):
            logprobs[output.request_id] += output.new_logprobs
        outcomes = [Outcome(r.output_token_ids, logprobs[r.request_id]) for r in requests]
        return outcomes, [request.num_cached_tokens for request in requests]

    def targets(self, in_company: bool) -> tuple[list[Outcome], list[int]]:
        if in_company:
            order = (*NEIGHBOURS[:2], *TARGETS, *NEIGHBOURS[2:])
            outcomes, cached = self.run(order)
            return outcomes[2:5], cached[2:5]
        alone = [self.run([target]) for target in TARGETS]
        return [o for outcomes, _ in alone for o in outcomes], [c for _, cs in alone for c in cs]


# ---------------------------------------------------------------- paths


def cold(runner: ModelRunner, budget: int, in_company: bool) -> list[Outcome]:
    outcomes, cached = Bench(runner, budget).targets(in_company)
    assert cached == [0, 0, 0]
    return outcomes


def whole_blocks(runner: ModelRunner, budget: int, in_company: bool) -> list[Outcome]:
    bench = Bench(runner, budget)
    bench.run([beginning_of(target, 0) for target in TARGETS])
    outcomes, cached = bench.targets(in_company)
    assert cached == [16, 32, 64]
    return outcomes


def part_of_a_block(runner: ModelRunner, budget: int, in_company: bool) -> list[Outcome]:
    bench = Bench(runner, budget)
    bench.run([beginning_of(target, 7) for target in TARGETS])
    outcomes, cached = bench.targets(in_company)
    assert cached == [23, 39, 71]
    return outcomes


def evicted(runner: ModelRunner, budget: int, in_company: bool) -> list[Outcome]:
    """Of one target at least, nothing is found."""
    bench = Bench(runner, budget, num_blocks=30)
    bench.run(TARGETS)
    bench.run([Target(tokens(99, 300), SamplingParams(temperature=0.0), max_tokens=2)])
    outcomes, cached = bench.targets(in_company)
    assert min(cached) == 0
    return outcomes


def preempted(runner: ModelRunner, budget: int, in_company: bool) -> list[Outcome]:
    """By neighbours that came first and grow."""
    assert in_company
    bench = Bench(runner, budget, num_blocks=21)
    outcomes, _ = bench.run((*GROWING, *TARGETS))
    assert bench.num_preemptions > 0
    return outcomes[len(GROWING) :]


def beginning_of(target: Target, num_more: int) -> Target:
    """Shares the first half of the prompt, in whole blocks, and `num_more` tokens of the next."""
    shared = len(target.prompt) // 2 // BLOCK_SIZE * BLOCK_SIZE + num_more
    return Target(target.prompt[:shared] + [5] * 20, target.sampling, max_tokens=1)


Way = Callable[[ModelRunner, int, bool], list[Outcome]]
PATHS: tuple[Way, ...] = (cold, whole_blocks, part_of_a_block, evicted, preempted)
COMBINATIONS = [
    (path, budget, in_company)
    for path, budget, in_company in itertools.product(PATHS, BUDGETS, (False, True))
    if in_company or path is not preempted  # nobody is preempted who is alone
]


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Mode:
    kernels: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False  # of the reference: the CPU kernels always are


MODES = {
    "reference": Mode("reference", batch_invariant=True),
    "cpu": Mode("cpu"),
    "cpu-float32-cache": Mode("cpu", kv_cache_dtype="float32"),
    "cpu-int8": Mode("cpu", "int8"),
    "cpu-int4": Mode("cpu", "int4"),
}


def make_runner(model_dir: Path, mode: Mode) -> ModelRunner:
    model = ModelConfig(
        str(model_dir),
        "m",
        kernels=mode.kernels,
        quantization=mode.quantization,
        batch_invariant=mode.batch_invariant,
    )
    cache = CacheConfig(num_blocks=NUM_BLOCKS, kv_cache_dtype=mode.kv_cache_dtype)
    runner = ModelRunner(CoreConfig(model, cache, LARGE_STEPS))
    assert runner.quantization == mode.quantization
    return runner


@pytest.mark.parametrize("mode", MODES)
def test_all_are_the_same(mode: str, tiny_model_dir: MakeTinyModel) -> None:
    model_dir = tiny_model_dir("llama", num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    check_identical(model_dir, MODES[mode], COMBINATIONS)


@pytest.mark.parametrize("mode", ["reference", "cpu-int8"])
@pytest.mark.parametrize(
    ("arch", "overrides"), [("mistral", {"sliding_window": 20}), ("qwen3", {"head_dim": 32})]
)
def test_other_architectures_too(
    arch: str, overrides: dict[str, object], mode: str, tiny_model_dir: MakeTinyModel
) -> None:
    model_dir = tiny_model_dir(arch, num_hidden_layers=2, vocab_size=VOCAB_SIZE, **overrides)
    check_identical(model_dir, MODES[mode], [(path, 50, True) for path in PATHS])


def check_identical(
    model_dir: Path, mode: Mode, combinations: Sequence[tuple[Way, int, bool]]
) -> None:
    runner = make_runner(model_dir, mode)
    expected = cold(runner, budget=256, in_company=False)
    assert len({tuple(outcome.token_ids) for outcome in expected}) == len(TARGETS)
    for path, budget, in_company in combinations:
        where = f"{path.__name__}, {budget}, {'in company' if in_company else 'alone'}"
        assert path(runner, budget, in_company) == expected, where


def test_with_the_plain_ops_all_are_the_same_but_for_near_ties(
    tiny_model_dir: MakeTinyModel,
) -> None:
    runner = make_runner(
        tiny_model_dir("llama", num_hidden_layers=2, vocab_size=VOCAB_SIZE), Mode("reference")
    )
    expected = cold(runner, budget=256, in_company=False)
    for path, budget in itertools.product(PATHS, (16, 50)):
        for got, want in zip(path(runner, budget, True), expected, strict=True):
            check_up_to_near_ties(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_the_embedded_model(mode: str, embedded_model_dir: Path) -> None:
    runner = make_runner(embedded_model_dir, MODES[mode])
    targets = [replace(target, max_tokens=8) for target in TARGETS]
    expected = [Bench(runner, 256).run([target])[0][0] for target in targets]
    bench = Bench(runner, 50)
    bench.run([beginning_of(target, 7) for target in targets])
    outcomes, cached = bench.run((*targets, *(replace(n, max_tokens=8) for n in NEIGHBOURS)))
    assert cached[:3] == [23, 39, 71]
    assert outcomes[:3] == expected


def check_up_to_near_ties(got: Outcome, want: Outcome) -> None:
    """Equal, or first different where the model itself can hardly tell the two best apart."""
    for i, (ours, theirs) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
        best = want.logprobs[i].top_logprobs
        if ours != theirs:
            assert best[0] - best[1] < NEAR_TIE
            return
        assert got.logprobs[i].top_logprobs == pytest.approx(best, abs=1e-3)
