"""Prefixes that end inside a block: what goes on in a copy says what it says when computed cold."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from engine_service.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.conftest import MakeTinyModel
from tests.engine_loop import GREEDY, LARGE_STEPS, EngineLoop

BLOCK_SIZE = 16
PREFIX = [1000 + 7 * i for i in range(41)]  # ends at the 9th slot of its third block


class WatchedRunner(ModelRunner):
    """Counts the blocks in use, and the copies."""

    def __init__(self, model_dir: Path, kernels: str) -> None:
        super().__init__(
            CoreConfig(
                model=ModelConfig(str(model_dir), "tiny", kernels=kernels),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=160),
                scheduler=LARGE_STEPS,
            )
        )
        self.most_blocks = 0
        self.num_copies = 0

    def execute_model(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> ModelRunnerOutput:
        tables = [share.block_ids for share in scheduler_output.scheduled]
        self.most_blocks = max(self.most_blocks, len({i for table in tables for i in table}))
        self.num_copies += len(scheduler_output.block_copies)
        return super().execute_model(scheduler_output, token_bitmask)


@pytest.fixture(params=[("llama", "reference"), ("llama", "cpu"), ("qwen3", "cpu")])
def runner(request: pytest.FixtureRequest, tiny_model_dir: MakeTinyModel) -> WatchedRunner:
    arch, kernels = request.param
    return WatchedRunner(tiny_model_dir(arch), kernels)


def loop(runner: ModelRunner) -> EngineLoop:
    return EngineLoop(runner, BLOCK_SIZE, token_budget=256)


def cold(runner: ModelRunner, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return loop(runner).generate([prompt], 20, sampling)[0].output_token_ids


def test_whoever_goes_on_in_a_copy_says_what_it_says_cold(runner: WatchedRunner) -> None:
    endings = [[50, 51, 52], [60], [70, 71] * 20, [80]]
    prompts = [[*PREFIX, *ending] for ending in endings]
    expected = [cold(runner, prompt) for prompt in prompts]
    runner.num_copies = 0
    warm = loop(runner)
    first = warm.generate(prompts[:1], 20)
    others = warm.generate(prompts[1:], 20)  # all three copy the first one's third block
    assert [r.output_token_ids for r in [*first, *others]] == expected
    assert [r.num_cached_tokens for r in others] == [len(PREFIX)] * 3
    assert runner.num_copies == 3


def test_a_conversation_goes_on_where_its_last_answer_ended(runner: WatchedRunner) -> None:
    warm = loop(runner)
    (turn,) = warm.generate([PREFIX], 20)
    prompt = [*turn.token_ids, 90, 91, 92]
    (next_turn,) = warm.generate([prompt], 20)
    assert next_turn.num_cached_tokens == len(turn.token_ids) - 1  # its last token had no step
    assert next_turn.output_token_ids == cold(runner, prompt)


def test_four_samples_hold_their_prompt_once(runner: WatchedRunner) -> None:
    prompt = [2000 + 3 * i for i in range(600)]  # 37 blocks of 16 and a half
    samplings = [SamplingParams(temperature=1.0, seed=5) for _ in range(4)]
    expected = []
    for index, sampling in enumerate(samplings):
        alone = Request("r", index, prompt, sampling, StoppingCriteria(max_tokens=6))
        loop(runner).run([alone])
        expected.append(alone.output_token_ids)
    assert len({tuple(ids) for ids in expected}) > 1
    runner.most_blocks = 0
    samples = [
        Request("r", index, prompt, sampling, StoppingCriteria(max_tokens=6))
        for index, sampling in enumerate(samplings)
    ]
    together = loop(runner)
    together.run(samples)
    assert [sample.output_token_ids for sample in samples] == expected
    assert runner.most_blocks == 37 + 4
    assert together.kv_cache_manager.num_hit_tokens == 3 * 599
