"""Deadlines and waits at the engine's own edge: what expires in the queue is an error, at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Client,
    Engine,
    client,
    engine_process,
    next_event,
    request,
)

QUEUE_TIMEOUT_SECONDS = 5.0


@pytest.fixture(scope="module")
def engine(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One sample runs at a time."""
    timeout = f"--queue-timeout={QUEUE_TIMEOUT_SECONDS}"
    flags = ("--max-num-seqs=1", timeout, ROOM_FOR_ENDLESS)
    work_dir = tmp_path_factory.mktemp("deadlines")
    with engine_process(tiny_model_dir("llama", **LONG_CONTEXT), work_dir, *flags) as running:
        yield running


@pytest.fixture
async def engine_client(engine: Engine) -> AsyncIterator[Client]:
    async with client(engine.grpc) as engine_client:
        yield engine_client


@contextlib.asynccontextmanager
async def occupied(engine_client: Client) -> AsyncIterator[None]:
    """Something else runs until the block ends."""
    call = engine_client.engine.Generate(request(prompt=[7, 7], max_tokens=ENDLESS))
    try:
        event = await next_event(call)
        while event is not None and not event.HasField("delta"):
            event = await next_event(call)
        yield
        assert not call.done(), "it ended too early"
    finally:
        call.cancel()
        await engine_client.wait_idle(20)


def counted(engine: Engine, name: str, label: str) -> float:
    with urllib.request.urlopen(f"http://{engine.metrics}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return float(line.split()[-1])


def samples_that_ended_in_error(engine: Engine) -> float:
    return counted(engine, "vllm:request_success_total", 'finished_reason="error"')


@pytest.mark.parametrize(("timeout", "least"), [(3.0, 3.0), (60.0, QUEUE_TIMEOUT_SECONDS)])
async def test_whichever_deadline_comes_first_ends_the_wait(
    engine: Engine, engine_client: Client, timeout: float, least: float
) -> None:
    num_errors = samples_that_ended_in_error(engine)
    async with occupied(engine_client):
        before = await engine_client.load()
        began = time.monotonic()
        answers = await asyncio.gather(
            *(
                engine_client.generate(request(prompt=[i] * 40, n=2), timeout=timeout)
                for i in (3, 4)
            )
        )
        assert least - 0.05 < time.monotonic() - began < 30
        for answer in answers:
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert answer.kinds() == ["accepted"]
            assert ("in the queue" in answer.error) is (least == QUEUE_TIMEOUT_SECONDS)
        await engine_client.wait_load(lambda load: load.num_waiting == 0, 20)
        after = await engine_client.load()
        assert after.prompt_tokens == before.prompt_tokens
    assert samples_that_ended_in_error(engine) == num_errors + 4


async def test_a_wait_that_will_not_end_in_time_is_refused_at_once(
    engine: Engine, engine_client: Client
) -> None:
    num_refused = counted(engine, "vllm:admission_rejections_total", 'reason="queue_wait"')
    async with occupied(engine_client):
        waiting = asyncio.create_task(engine_client.generate(request(n=16)))
        await asyncio.sleep(1.0)  # the queue stands still, which is measured
        answer = await engine_client.generate(request(), timeout=3)
        assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert answer.retry_after_seconds is not None
        assert answer.events == []
        assert (await waiting).code is grpc.StatusCode.DEADLINE_EXCEEDED
    # with nothing waiting it is let in, whatever was measured
    answer = await engine_client.generate(request(max_tokens=1), timeout=30)
    assert answer.code is grpc.StatusCode.OK
    refused = counted(engine, "vllm:admission_rejections_total", 'reason="queue_wait"')
    assert refused == num_refused + 1
