"""SIGTERM drains the engine service: what runs may finish, what comes is refused, nothing stays."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.conftest import MakeTinyModel
from tests.running_engine import Answer, Client, Engine, client, engine_process, request


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def engine(model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Its parameter: seconds of grace."""
    with engine_process(model_dir, tmp_path, f"--shutdown-timeout={request.param}") as running:
        yield running


def grace(seconds: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [seconds], indirect=True)


async def started(engine_client: Client, max_tokens: int) -> asyncio.Task[Answer]:
    stream = asyncio.create_task(engine_client.generate(request(max_tokens=max_tokens)))
    await engine_client.wait_running(1)
    return stream


async def exit_code(engine: Engine, seconds: float) -> int:
    return await asyncio.wait_for(asyncio.to_thread(engine.process.wait), seconds)


@grace(30)
async def test_running_streams_finish_and_new_ones_are_refused(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        stream = await started(engine_client, max_tokens=600)
        engine.process.send_signal(signal.SIGTERM)
        await engine_client.wait_serving(False, 1)
        refused = await engine_client.generate(request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "ENGINE_UNAVAILABLE"
        answer = await stream
        assert answer.code is grpc.StatusCode.OK
        assert len(answer.tokens()) == 600
        assert await exit_code(engine, 10) == 0
    host, port = engine.grpc.split(":")
    with socket.create_server((host, int(port))):
        pass  # the port is free again
    assert "Traceback" not in engine.log.read_text()


@grace(2)
async def test_what_outlasts_the_grace_gets_an_error(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        streams = [
            asyncio.create_task(engine_client.generate(request(max_tokens=2_000, n=16)))
            for _ in range(4)
        ]
        await engine_client.wait_running(1)
        engine.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        for answer in await asyncio.gather(*streams):
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.reason == "ENGINE_UNAVAILABLE"
        assert 1.5 < time.monotonic() - began < 6
        assert await exit_code(engine, 10) == 0


@grace(30)
async def test_a_second_signal_ends_the_grace(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        stream = asyncio.create_task(engine_client.generate(request(max_tokens=2_000, n=64)))
        await engine_client.wait_running(1)
        engine.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        engine.process.send_signal(signal.SIGINT)
        assert (await stream).code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 1.5
        assert await exit_code(engine, 8) == 0
