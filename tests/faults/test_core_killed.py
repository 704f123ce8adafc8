"""The core process dies or freezes under load; the same facade serves again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Served, Stream, engine, post, probe, serve, stream, wait_idle


@pytest.fixture(scope="module")
def served(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(embedded_model_dir, tmp_path_factory.mktemp("faults")) as running:
        yield running


def body(served: Served, **fields: Any) -> dict[str, Any]:
    return {
        "model": served.model,
        "prompt": "Once upon a time",
        "max_tokens": 2_000,
        "ignore_eos": True,
        **fields,
    }


async def core_pid(served: Served) -> int:
    async with engine(served) as client:
        return (await client.get_server_info()).core_pid


async def until(check: Any, seconds: float, what: str) -> float:
    """Seconds until `check()` holds."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def answered_again(served: Served, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        status, answer, _ = await post(served.http, "/v1/completions", body(served, max_tokens=3))
        if status == 200:
            assert answer["usage"]["completion_tokens"] == 3
            return
        assert status == 503, answer
        assert time.monotonic() < deadline, answer
        await asyncio.sleep(0.2)


async def test_sigkill_of_the_core(served: Served) -> None:
    async def streamed() -> tuple[Stream, float]:
        answer = await stream(served.http, "/v1/completions", body(served))
        return answer, time.monotonic()

    async def plain() -> tuple[int, dict[str, Any], float]:
        status, answer, _ = await post(served.http, "/v1/completions", body(served))
        return status, answer, time.monotonic()

    streams = [asyncio.create_task(streamed()) for _ in range(4)]
    whole = asyncio.create_task(plain())
    await asyncio.sleep(2.0)
    pid = await core_pid(served)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: probe(served.http + "/readyz") == 503, 5, "readyz 503")
    assert probe(served.http + "/healthz") == 200

    for answer, ended in await asyncio.gather(*streams):
        assert ended - killed < 5
        assert answer.status == 200
        assert answer.finish_reasons() == []
        assert answer.events[-1]["error"]["code"] == "engine_unavailable"
        assert answer.num_done == 1
    status, failure, ended = await whole
    assert ended - killed < 5
    assert (status, failure["error"]["code"]) == (503, "engine_unavailable")

    await answered_again(served, 60)
    assert await core_pid(served) not in (0, pid)
    await until(lambda: probe(served.http + "/readyz") == 200, 20, "ready again")
    await wait_idle(served, 20)


async def test_a_frozen_core_is_noticed_and_loses_nothing(served: Served) -> None:
    running = asyncio.create_task(
        stream(served.http, "/v1/completions", body(served, max_tokens=60))
    )
    await asyncio.sleep(1.0)
    pid = await core_pid(served)
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: probe(served.http + "/readyz") == 503, 20, "frozen core noticed")
        assert probe(served.http + "/healthz") == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    answer = await running
    assert answer.finish_reasons() == ["length"]
    await until(lambda: probe(served.http + "/readyz") == 200, 20, "ready again")
    await wait_idle(served, 20)
