"""CASES O3 and C7: a full queue refuses honestly, and a deadline that passes in it is an error."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from clients import Delta, GenerateRequest, StoppingCriteria
from tests.conftest import MakeTinyModel
from tests.serving import Served, engine, load, post, probe, serve, stream, wait_idle

COMPLETIONS = "/v1/completions"
NUM_RUNNING, NUM_QUEUED, EXCESS = 4, 16, 50


@pytest.fixture(scope="module")
def slow_queue(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Its steps take some milliseconds: whoever occupies it does so for long enough."""
    slow = tiny_model_dir("llama", num_hidden_layers=64)
    flags = (f"--max-num-seqs={NUM_RUNNING}", f"--max-num-queued-reqs={NUM_QUEUED}")
    with serve(slow, tmp_path_factory.mktemp("slow_queue"), *flags) as running:
        yield running


def body(served: Served, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"model": served.model, "prompt": prompt, "ignore_eos": True, **fields}


@contextlib.asynccontextmanager
async def saturated(served: Served) -> AsyncIterator[None]:
    """Other callers of the engine hold every place to run, until the block ends."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(engine(served))
        for number in range(NUM_RUNNING):
            long = GenerateRequest(
                prompt=(300 + number, 7), stopping=StoppingCriteria(ignore_eos=True)
            )
            generation = await stack.enter_async_context(client.generate(long))
            while not isinstance(await anext(generation), Delta):
                pass
        yield
        assert (await client.get_load()).num_running == NUM_RUNNING, "they ended too early"


def rejections(served: Served) -> float:
    with urllib.request.urlopen(served.metrics + "/metrics", timeout=5) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    (line,) = [
        line
        for line in lines
        if line.startswith("vllm:admission_rejections_total") and 'reason="queue_full"' in line
    ]
    return float(line.split()[-1])


# ---------------------------------------------------------------- O3


@dataclass
class Reply:
    n: int
    status: int
    seconds: float
    headers: dict[str, str]
    body: dict[str, Any]


async def ask(
    session: aiohttp.ClientSession, served: Served, number: int, n: int, *, streamed: bool
) -> Reply:
    began = time.monotonic()
    fields = body(served, [10 + number, 3, 5], n=n, max_tokens=3, stream=streamed)
    async with session.post(served.http + COMPLETIONS, json=fields) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status == 200 and streamed:
            content: dict[str, Any] = {"raw": await answer.read()}
        else:
            content = await answer.json()
        return Reply(n, answer.status, time.monotonic() - began, headers, content)


def check_refusal(reply: Reply) -> None:
    assert reply.status == 429, reply
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["code"] == "queue_full"
    assert reply.headers["content-type"].startswith("application/json")  # no SSE was opened
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert 250 <= int(reply.headers["retry-after-ms"]) <= 60_000
    assert reply.headers["x-should-retry"] == "true"


def check_answer(reply: Reply) -> None:
    assert reply.status == 200, reply
    if "raw" in reply.body:
        assert reply.body["raw"].endswith(b"data: [DONE]\n\n")
    else:
        assert len(reply.body["choices"]) == reply.n
        assert all(choice["finish_reason"] == "length" for choice in reply.body["choices"])


async def settled(tasks: dict[asyncio.Task[Reply], int], seconds: float) -> None:
    """What is refused has been answered: the rest fills the queue to the last sample."""
    deadline = time.monotonic() + seconds
    while sum(n for task, n in tasks.items() if not task.done()) > NUM_QUEUED:
        assert time.monotonic() < deadline, "more wait than may"
        await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)


async def overload_once(
    served: Served, session: aiohttp.ClientSession, chance: random.Random
) -> list[float]:
    """Returns how long each refusal took, in seconds."""
    sizes = [1] * (NUM_QUEUED + EXCESS)
    for index in chance.sample(range(NUM_QUEUED // 2), 2):
        sizes[index] = 4
    async with saturated(served):
        tasks = {
            asyncio.create_task(ask(session, served, number, n, streamed=number % 3 == 0)): n
            for number, n in enumerate(sizes)
        }
        await settled(tasks, 30)
        assert probe(served.http + "/healthz") == 200
        refused = [task.result() for task in tasks if task.done()]
        accepted = {task: n for task, n in tasks.items() if not task.done()}
        assert sum(accepted.values()) == NUM_QUEUED  # n counts as n
        for reply in refused:
            check_refusal(reply)
        given_up = chance.sample(sorted(accepted, key=id), len(accepted) // 3)
        for task in given_up:
            task.cancel()
    for task in accepted:
        if task not in given_up:
            check_answer(await task)
    await asyncio.gather(*given_up, return_exceptions=True)
    await wait_idle(served, 20)
    return [reply.seconds for reply in refused]


async def test_o3_a_full_queue_refuses_honestly_and_comes_back_whole(slow_queue: Served) -> None:
    chance = random.Random(3)
    before = rejections(slow_queue)
    waits: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(20):
            waits += await overload_once(slow_queue, session, chance)
    assert rejections(slow_queue) == before + len(waits)
    # the median: with sixty at once on a busy machine, the last may have to wait for a processor
    assert statistics.median(waits) < 3.0


# ---------------------------------------------------------------- C7


async def expiring(served: Served, number: int) -> float:
    """Seconds to the error."""
    fields = body(served, [50 + number] * 40, max_tokens=4, stream=number % 2 == 1)
    began = time.monotonic()
    status, answer, headers = await post(
        served.http, COMPLETIONS, fields, {"x-request-timeout": "3"}
    )
    assert status == 504, answer
    assert answer["error"]["code"] == "deadline_exceeded"
    assert headers["x-should-retry"] == "false"
    return time.monotonic() - began


async def test_c7_a_deadline_that_passes_in_the_queue_is_an_error(slow_queue: Served) -> None:
    async with saturated(slow_queue):
        before = await load(slow_queue)
        for seconds in await asyncio.gather(*(expiring(slow_queue, i) for i in range(5))):
            assert 2.9 < seconds < 10
        after = await load(slow_queue)
        assert after.prompt_tokens == before.prompt_tokens  # they cost no prefill
    await wait_idle(slow_queue, 20)


async def test_c7_a_deadline_that_passes_in_a_stream_ends_it_with_an_error(
    slow_queue: Served,
) -> None:
    fields = body(slow_queue, [9, 8, 7], max_tokens=100_000)
    began = time.monotonic()
    answer = await stream(slow_queue.http, COMPLETIONS, fields, {"x-request-timeout": "3"})
    assert answer.status == 200
    assert 2.9 < time.monotonic() - began < 10
    assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
    assert answer.events[-1]["usage"]["completion_tokens"] > 0
    assert answer.finish_reasons() == []
    assert answer.num_done == 1
    await wait_idle(slow_queue, 20)
