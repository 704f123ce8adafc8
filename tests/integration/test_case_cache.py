"""CASES K1 and K6: prompts around block edges, and requests that can never fit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Served, engine, post, serve, wait_idle

COMPLETIONS = "/v1/completions"


async def complete(served: Served, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": served.model, "prompt": prompt, "temperature": 0, **fields}
    status, answer, _ = await post(served.http, COMPLETIONS, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
async def test_k1_full_hits_around_block_edges(served: Served, length: int) -> None:
    prompt = [5_000 + 97 * length + 13 * number for number in range(length)]
    runs = [await complete(served, prompt, max_tokens=4, logprobs=2) for _ in range(3)]
    cached = [run["usage"]["prompt_tokens_details"]["cached_tokens"] for run in runs]
    assert cached[0] == 0
    assert cached[1] == cached[2] == length - 1  # the last one's logits have to be computed
    choices = [run["choices"][0] for run in runs]
    assert len({choice["text"] for choice in choices}) == 1
    for choice in choices[1:]:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            choices[0]["logprobs"]["token_logprobs"], abs=1e-2
        )
    longer = await complete(served, [*prompt, 11, 12, 13], max_tokens=4)
    found = longer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert length <= found <= length + 2


@pytest.fixture(scope="module")
def small_pool(
    embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = ("--num-gpu-blocks-override", "128", "--max-model-len", "8192")
    with serve(embedded_model_dir, tmp_path_factory.mktemp("small_pool"), *flags) as running:
        yield running


async def hi(served: Served) -> None:
    """The request behind the impossible one is answered in time."""
    began = time.monotonic()
    await complete(served, [100, 101, 102], max_tokens=2)
    assert time.monotonic() - began < 60


async def test_k6_a_prompt_beyond_the_pool_is_refused_at_the_door(small_pool: Served) -> None:
    body = {"model": small_pool.model, "prompt": [7] * 3_000, "max_tokens": 4}
    began = time.monotonic()
    status, answer, _ = await post(small_pool.http, COMPLETIONS, body)
    assert time.monotonic() - began < 10
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "3000" in answer["error"]["message"] and "2048" in answer["error"]["message"]
    await hi(small_pool)
    await wait_idle(small_pool, 20)


async def test_k6_an_answer_beyond_the_pool_ends_by_length(small_pool: Served) -> None:
    prompt = [300 + number for number in range(1_900)]
    answer, _ = await asyncio.gather(
        complete(small_pool, prompt, max_tokens=1_000, ignore_eos=True), hi(small_pool)
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2_048
    await wait_idle(small_pool, 20)


async def test_k6_many_samples_of_a_long_prompt_take_turns(small_pool: Served) -> None:
    prompt = [900 + number for number in range(1_000)]
    answer, _ = await asyncio.gather(
        complete(small_pool, prompt, max_tokens=2, n=64, ignore_eos=True), hi(small_pool)
    )
    assert [choice["index"] for choice in answer["choices"]] == list(range(64))
    assert answer["usage"]["completion_tokens"] == 128
    await wait_idle(small_pool, 20)


async def test_samples_of_one_prompt_hold_it_once(small_pool: Served) -> None:
    """1,000 tokens are 63 blocks: of the pool's 128, two samples would take all if each had its
    own. In fact each has its own tail only, in which it goes on."""
    prompt = [2_000 + number for number in range(1_000)]
    most_running, most_used = 0, 0

    async def watch() -> None:
        nonlocal most_running, most_used
        async with engine(small_pool) as client:
            while True:
                report = await client.get_load()
                most_running = max(most_running, report.num_running)
                most_used = max(most_used, report.used_blocks)
                await asyncio.sleep(0.01)

    before = await wait_idle(small_pool, 20)
    watching = asyncio.create_task(watch())
    await complete(small_pool, prompt, max_tokens=20, n=4, temperature=1, seed=3, ignore_eos=True)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    after = await wait_idle(small_pool, 20)
    assert most_running == 4
    assert 62 + 4 <= most_used <= 62 + 4 * 2  # full ones once; 8 + 20 tokens each, one copied
    assert after.prompt_tokens - before.prompt_tokens == 1_000 + 3
    assert after.prefix_cache_hits - before.prefix_cache_hits == 3 * 999
