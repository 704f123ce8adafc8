"""CASES O7: SIGTERM drains, at the facade and at the engine; what runs and what waits ends well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Engine,
    engine_process,
)
from tests.serving import Stream, post, probe, stream

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
NUM_RUNNING = 5  # four streams and a plain one; two more wait
TOKENS = 400
DEEP = {"num_hidden_layers": 64}  # a tiny model whose answers take seconds
Reply = tuple[int, dict[str, Any], Any]


@dataclass
class Both:
    engine: Engine
    facade: asyncio.subprocess.Process
    http: str
    log: Path

    def body(self, number: int, max_tokens: int = TOKENS) -> dict[str, Any]:
        return {
            "model": self.engine.model,
            "prompt": [10 + number, 3],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }


@contextlib.asynccontextmanager
async def both(
    model_dir: Path, tmp_path: Path, grace_seconds: float = 90, *engine_flags: str
) -> AsyncIterator[Both]:
    grace = f"--shutdown-timeout={grace_seconds}"
    flags = (f"--max-num-seqs={NUM_RUNNING}", grace, *engine_flags)
    with engine_process(model_dir, tmp_path, *flags) as engine:
        log = tmp_path / "facade.log"
        with log.open("w") as errors:
            facade = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "http_facade", f"--engine={engine.grpc}", "--port=0"),
                grace,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert facade.stdout is not None
        try:
            http = json.loads(await asyncio.wait_for(facade.stdout.readline(), 60))["http"]
            while await asyncio.to_thread(probe, http + "/readyz") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            yield Both(engine, facade, http, log)
        finally:
            if facade.returncode is None:
                facade.kill()
            await facade.communicate()


@dataclass
class Work:
    streams: list[asyncio.Task[Stream]]
    whole: asyncio.Task[Reply]
    queued: list[asyncio.Task[Stream]]

    async def ended_well(self) -> None:
        for task in (*self.streams, *self.queued):
            answer = await task
            assert answer.status == 200 and answer.finish_reasons() == ["length"], answer.events[-1]
            assert answer.num_done == 1
        status, body, _ = await self.whole
        assert status == 200 and body["usage"]["completion_tokens"] == TOKENS


async def work(served: Both, max_tokens: int = TOKENS) -> Work:
    """All of it is there when this returns: the streams run, and the last two wait."""

    def streamed(number: int) -> asyncio.Task[Stream]:
        body = served.body(number, max_tokens)
        return asyncio.create_task(stream(served.http, COMPLETIONS, body))

    streams = [streamed(number) for number in range(4)]
    body = served.body(4, max_tokens)
    whole = asyncio.create_task(post(served.http, COMPLETIONS, body))
    await running(served, waiting=0)
    queued = [streamed(number) for number in (5, 6)]
    await running(served, waiting=2)
    return Work(streams, whole, queued)


async def running(served: Both, waiting: int) -> None:
    from clients import EngineClient

    deadline = time.monotonic() + 30
    async with EngineClient(served.engine.grpc) as client:
        while True:
            load = await client.get_load()
            if (load.num_running, load.num_waiting) == (NUM_RUNNING, waiting):
                return
            assert time.monotonic() < deadline, load
            await asyncio.sleep(0.01)


async def refused_from_now_on(served: Both, until: Work) -> int:
    """Keeps sending while the work goes on; returns how many were refused."""
    refused = 0
    while not all(task.done() for task in (*until.streams, *until.queued)):
        try:
            status, body, headers = await post(served.http, COMPLETIONS, served.body(9, 1))
        except OSError:
            return refused + 1
        assert status == 503 and body["error"]["code"] == "engine_unavailable", body
        assert headers["Retry-After"]
        refused += 1
        await asyncio.sleep(0.02)
    return refused


async def until_unready(served: Both) -> None:
    deadline = time.monotonic() + 10
    while await asyncio.to_thread(probe, served.http + "/readyz") != 503:
        assert time.monotonic() < deadline, "still ready"
        await asyncio.sleep(0.02)


def is_free(http: str) -> bool:
    host, port = http.rpartition("//")[2].split(":")
    with socket.create_server((host, int(port))):
        return True


async def test_o7_the_facade_drains(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    async with both(tiny_model_dir("llama", **DEEP), tmp_path) as served:
        going_on = await work(served)
        served.facade.send_signal(signal.SIGTERM)
        await until_unready(served)
        assert await refused_from_now_on(served, going_on) > 0
        await going_on.ended_well()
        assert await asyncio.wait_for(served.facade.wait(), 30) == 0
        assert is_free(served.http)
        assert "Traceback" not in served.log.read_text()
        assert served.engine.process.poll() is None  # the engine is nobody's child here


async def test_o7_the_engine_drains(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    async with both(tiny_model_dir("llama", **DEEP), tmp_path) as served:
        going_on = await work(served)
        served.engine.process.send_signal(signal.SIGTERM)
        await until_unready(served)
        assert await refused_from_now_on(served, going_on) > 0
        await going_on.ended_well()
        code = await asyncio.wait_for(asyncio.to_thread(served.engine.process.wait), 45)
        assert code == 0
        assert is_free("http://" + served.engine.grpc)
        # the facade lives on, and says what it is
        assert await asyncio.to_thread(probe, served.http + "/healthz") == 200
        assert await asyncio.to_thread(probe, served.http + "/readyz") == 503


@pytest.mark.parametrize("who", ["facade", "engine"])
@pytest.mark.parametrize("how", ["past the grace", "second signal"])
async def test_o7_what_outlasts_the_grace_ends_with_an_error(
    tiny_model_dir: MakeTinyModel, tmp_path: Path, who: str, how: str
) -> None:
    grace_seconds = 1 if how == "past the grace" else 90
    model_dir = tiny_model_dir("llama", **LONG_CONTEXT)
    async with both(model_dir, tmp_path, grace_seconds, ROOM_FOR_ENDLESS) as served:
        going_on = await work(served, max_tokens=ENDLESS)
        process = served.facade if who == "facade" else served.engine.process
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        if how == "second signal":
            await until_unready(served)
            process.send_signal(signal.SIGTERM)
        for task in going_on.streams:
            answer = await asyncio.wait_for(task, 45)
            assert answer.events[-1]["error"]["code"] == "engine_unavailable", answer.events[-1]
            assert answer.finish_reasons() == [] and answer.num_done == 1
        for queued in going_on.queued:  # nothing was sent yet: its status is the real one
            assert (await asyncio.wait_for(queued, 45)).status == 503
        status, _, _ = await asyncio.wait_for(going_on.whole, 45)
        assert status == 503
        wait = served.facade.wait() if who == "facade" else _wait(served.engine)
        assert await asyncio.wait_for(wait, 45) == 0
        assert time.monotonic() - began < 45
        if who == "engine":
            assert not _children_of(served.engine.process.pid)


async def _wait(engine: Engine) -> int:
    return await asyncio.to_thread(engine.process.wait)


def _children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found
