"""A server with the scheduler's policy set by flags: what its callers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Served, post, serve, wait_idle

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def with_policy(
    embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = [
        "--target-itl-ms=200",
        "--long-prefill-token-threshold=96",
        "--tenant-weights=light=2",
        "--priority-aging=5",
    ]
    with serve(embedded_model_dir, tmp_path_factory.mktemp("policy"), *flags) as running:
        yield running


async def complete(served: Served, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {"model": served.model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
    status, answer, _ = await post(served.http, COMPLETIONS, {**body, "ignore_eos": True})
    assert status == 200, answer
    return answer


async def test_a_burst_computes_its_prefix_once_while_a_stream_runs(with_policy: Served) -> None:
    prefix = [1_000 + 7 * number for number in range(1_500)]
    prompts = [[*prefix, *range(30_000 + 50 * i, 30_020 + 50 * i)] for i in range(8)]
    before = await wait_idle(with_policy, 5)
    stream, *answers = await asyncio.gather(
        complete(with_policy, [1, 2, 3], 60), *(complete(with_policy, p, 2) for p in prompts)
    )
    after = await wait_idle(with_policy, 5)
    assert stream["usage"]["completion_tokens"] == 60
    cached = sorted(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
    assert cached[0] == 0
    # whole blocks in any case; of the last one, what was there when the leader's chunk ended
    assert all(1_488 <= tokens <= 1_500 for tokens in cached[1:])
    computed = after.prompt_tokens - before.prompt_tokens
    assert computed == 3 + sum(1_520 - tokens for tokens in cached)
    alone = await complete(with_policy, prompts[3], 2)
    assert alone["choices"][0]["text"] == answers[3]["choices"][0]["text"]
