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

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Engine,
    client,
    engine_process,
    request,
)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama", **LONG_CONTEXT)


@pytest.fixture
def engine(model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Its parameter: seconds of grace."""
    flags = (f"--shutdown-timeout={request.param}", ROOM_FOR_ENDLESS)
    with engine_process(model_dir, tmp_path, *flags) as running:
        yield running


def grace(seconds: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [seconds], indirect=True)


async def exit_code(engine: Engine) -> int:
    return await asyncio.wait_for(asyncio.to_thread(engine.process.wait), 45)


@grace(90)
async def test_running_streams_go_on_and_new_ones_are_refused(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        long = request(request_id="long", max_tokens=ENDLESS)
        stream = asyncio.create_task(engine_client.generate(long))
        await engine_client.wait_running(1)
        engine.process.send_signal(signal.SIGTERM)
        await engine_client.wait_serving(False, 20)
        refused = await engine_client.generate(request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "ENGINE_UNAVAILABLE"
        before = (await engine_client.load()).generated_tokens
        after = await engine_client.wait_load(
            lambda load: load.generated_tokens > before + 100, seconds=20
        )
        await engine_client.engine.Abort(pb.AbortRequest(request_id="long"))
        answer = await stream
        assert answer.code is grpc.StatusCode.OK
        assert answer.finished().reason == pb.FINISH_REASON_ABORT
        assert len(answer.tokens()) >= after.generated_tokens
        assert await exit_code(engine) == 0
    host, port = engine.grpc.split(":")
    with socket.create_server((host, int(port))):
        pass  # the port is free again
    assert "Traceback" not in engine.log.read_text()


@grace(2)
async def test_what_outlasts_the_grace_gets_an_error(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        streams = [
            asyncio.create_task(engine_client.generate(request(max_tokens=ENDLESS, n=16)))
            for _ in range(4)
        ]
        await engine_client.wait_running(1)
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        for answer in await asyncio.gather(*streams):
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.reason == "ENGINE_UNAVAILABLE"
        assert 1.5 < time.monotonic() - began < 30
        assert await exit_code(engine) == 0


@grace(90)
async def test_a_second_signal_ends_the_grace(engine: Engine) -> None:
    async with client(engine.grpc) as engine_client:
        stream = asyncio.create_task(engine_client.generate(request(max_tokens=ENDLESS, n=64)))
        await engine_client.wait_running(1)
        engine.process.send_signal(signal.SIGINT)
        await engine_client.wait_serving(False, 20)
        began = time.monotonic()
        engine.process.send_signal(signal.SIGINT)
        assert (await stream).code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 30
        assert await exit_code(engine) == 0
