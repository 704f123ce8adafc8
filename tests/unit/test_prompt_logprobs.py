"""Logprobs of prompts: equal to one pass over the whole prompt, however it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.messages import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    StoppingCriteria,
    TokenLogprobs,
)
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest
from tests.conftest import MakeTinyModel
from tests.engine_loop import LARGE_STEPS, EngineLoop

PROMPT = [(37 * i + 11) % 49_000 for i in range(90)]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(
        CoreConfig(
            model=ModelConfig(str(model_dir), "tiny", quantization="none"),
            cache=CacheConfig(num_blocks=12, kv_cache_dtype="float32"),
            scheduler=LARGE_STEPS,
        )
    )


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> torch.Tensor:
    """[90, V]: transformers' logprobs after each prompt token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs


def asking(
    request_id: str,
    num_top: int | None = 2,
    prompt: list[int] = PROMPT,
    max_tokens: int = 1,
    index: int = 0,
    priority: int = 0,
) -> Request:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=num_top)
    stopping = StoppingCriteria(max_tokens=max_tokens)
    return Request(request_id, index, list(prompt), sampling, stopping, priority=priority)


def told(outputs: list[RequestOutput], request_id: str, index: int = 0) -> list[TokenLogprobs]:
    mine = [o for o in outputs if (o.request_id, o.index) == (request_id, index)]
    return [one for output in mine for one in output.new_prompt_logprobs]


def check(entries: list[TokenLogprobs], expected: torch.Tensor, prompt: list[int]) -> None:
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries):
        row, token_id = expected[position], prompt[position + 1]
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
        assert entry.rank == pytest.approx(int((row > row[token_id]).sum()) + 1, abs=5)


@pytest.mark.parametrize("token_budget", [256, 64, 7])
def test_in_any_chunks(runner: ModelRunner, expected: torch.Tensor, token_budget: int) -> None:
    outputs = EngineLoop(runner, BLOCK_SIZE, token_budget).run([asking("a")])
    check(told(outputs, "a"), expected, PROMPT)


def test_a_cached_prefix_is_of_no_use_and_what_is_computed_is_cached(
    runner: ModelRunner, expected: torch.Tensor
) -> None:
    loop = EngineLoop(runner, BLOCK_SIZE, token_budget=256)
    for request_id in ("first", "second"):
        outputs = loop.run([asking(request_id)])
        check(told(outputs, request_id), expected, PROMPT)
        assert outputs[-1].num_cached_tokens == 0
    outputs = loop.run([asking("other", num_top=None)])
    assert outputs[-1].num_cached_tokens >= 80
    assert told(outputs, "other") == []


def test_each_token_is_told_of_once_though_preempted(
    runner: ModelRunner, expected: torch.Tensor
) -> None:
    loop = EngineLoop(runner, BLOCK_SIZE, token_budget=40)
    first = asking("first", prompt=PROMPT[:70], max_tokens=60)
    second = asking("second", prompt=PROMPT[:75], max_tokens=60, priority=1)
    outputs = loop.run([first, second])
    assert loop.num_preemptions > 0
    check(told(outputs, "first"), expected, PROMPT[:70])
    check(told(outputs, "second"), expected, PROMPT[:75])


def test_samples_share_what_the_first_one_tells(runner: ModelRunner) -> None:
    loop = EngineLoop(runner, BLOCK_SIZE, token_budget=256)
    outputs = loop.run([asking("a", prompt=PROMPT[:20]), asking("a", prompt=PROMPT[:20], index=1)])
    assert len(told(outputs, "a")) == 19
    assert told(outputs, "a", index=1) == []


def test_a_prompt_of_one_token_has_none(runner: ModelRunner) -> None:
    outputs = EngineLoop(runner, BLOCK_SIZE, token_budget=256).run([asking("a", prompt=[5])])
    assert told(outputs, "a") == []
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.reason is FinishReason.LENGTH


def test_positions_of_a_share_that_tell_something() -> None:
    request = asking("a", prompt=PROMPT[:10])

    def share(first: int, count: int) -> range:
        return ScheduledRequest.of(request, first, count, []).prompt_logprobs_range

    assert share(0, 4) == range(4)
    assert share(4, 6) == range(4, 9)
    request.num_prefilled_tokens = 6
    assert share(0, 10) == range(6, 9)
    assert not share(0, 6)
    assert not ScheduledRequest.of(asking("b", num_top=None), 0, 10, []).prompt_logprobs_range
