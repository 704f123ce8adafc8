"""Overload and the official client: at three times the capacity it needs at most two attempts per
success, and none comes before its hint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx2
import openai
import pytest

from tests.conftest import MakeTinyModel
from tests.serving import Served, serve, wait_idle

NUM_RUNNING, NUM_QUEUED = 4, 8
CAPACITY = NUM_RUNNING + NUM_QUEUED
ROUNDS = 4


@pytest.fixture(scope="module")
def small_queue(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = (f"--max-num-seqs={NUM_RUNNING}", f"--max-num-queued-reqs={NUM_QUEUED}")
    with serve(tiny_model_dir("llama"), tmp_path_factory.mktemp("retries"), *flags) as running:
        yield running


@dataclass
class Attempts:
    """Of one call of the SDK: when each was sent, and what each was told."""

    sent: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    hints: list[float] = field(default_factory=list)  # seconds, after a refusal
    refused: list[float] = field(default_factory=list)  # when it was told so


class Recorder(httpx2.AsyncBaseTransport):
    def __init__(self, attempts: Attempts) -> None:
        self._inner = httpx2.AsyncHTTPTransport()
        self._attempts = attempts

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._attempts.sent.append(time.monotonic())
        response = await self._inner.handle_async_request(request)
        self._attempts.statuses.append(response.status_code)
        if response.status_code == 429:
            self._attempts.hints.append(int(response.headers["retry-after-ms"]) / 1000)
            self._attempts.refused.append(time.monotonic())
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


async def call(served: Served, number: int) -> Attempts:
    attempts = Attempts()
    async with openai.AsyncOpenAI(
        base_url=served.http + "/v1",
        api_key="none",
        max_retries=2,
        http_client=openai.DefaultAsyncHttpxClient(transport=Recorder(attempts)),
    ) as client:
        answer = await client.completions.create(
            model=served.model,
            prompt=[10 + number % 40_000, 3, 5],
            max_tokens=100,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 100
    return attempts


async def caller(served: Served, number: int) -> list[Attempts]:
    """One after the other: as many callers as three times what the server holds."""
    return [await call(served, number * ROUNDS + round_number) for round_number in range(ROUNDS)]


@pytest.mark.slow
async def test_at_three_times_the_capacity_two_attempts_are_enough(small_queue: Served) -> None:
    done = await asyncio.gather(*(caller(small_queue, number) for number in range(3 * CAPACITY)))
    calls = [attempts for of_caller in done for attempts in of_caller]
    num_successes = len(calls)
    num_attempts = sum(len(attempts.sent) for attempts in calls)
    print(f"{num_attempts} attempts for {num_successes} successes")
    assert all(attempts.statuses[-1] == 200 for attempts in calls)
    assert num_attempts > num_successes, "the server was never full"
    assert num_attempts <= 2 * num_successes
    for attempts in calls:
        for hint, told, again in zip(
            attempts.hints, attempts.refused, attempts.sent[1:], strict=True
        ):
            assert again - told >= hint - 0.005
    await wait_idle(small_queue, 20)
