"""The core's process dies, freezes or can't start; the service notices, tells, and recovers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from engine_service.config import CacheConfig, ServiceConfig
from engine_service.service import EngineService
from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    Answer,
    Client,
    client,
    engine_process,
    request,
    service_config,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama", **LONG_CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(model_dir: Path) -> AsyncIterator[EngineService]:
    """One for the tests of this file that leave it serving; they share its event loop."""
    async with EngineService(roomy_config(model_dir, stall_timeout_seconds=3.0)) as running:
        yield running


def roomy_config(model_dir: Path, **fields: object) -> ServiceConfig:
    """With memory for what runs until somebody ends it."""
    config = service_config(model_dir, **fields)
    core = msgspec.structs.replace(config.core, cache=CacheConfig(num_blocks=8192))
    return msgspec.structs.replace(config, core=core)


async def watch_health(engine_client: Client, seen: list[int]) -> None:
    async for answer in engine_client.health.Watch(health_pb2.HealthCheckRequest()):
        seen.append(answer.status)


async def start_streams(engine_client: Client, count: int) -> list[asyncio.Task[Answer]]:
    """So many streams that run."""
    streams = [
        asyncio.create_task(
            engine_client.generate(
                request(request_id=f"stream-{i}", prompt=[i, 2], max_tokens=ENDLESS)
            )
        )
        for i in range(count)
    ]
    await engine_client.wait_running(count)
    return streams


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_core_fails_its_streams_and_is_replaced(service: EngineService) -> None:
    async with client(service.grpc_address) as engine_client:
        seen: list[int] = []
        watch = asyncio.create_task(watch_health(engine_client, seen))
        streams = await start_streams(engine_client, 4)
        pid = await engine_client.core_pid()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for answer in await asyncio.gather(*streams):
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.reason == "ENGINE_UNAVAILABLE"
            assert answer.retry_after_seconds is not None
            assert "finished" not in answer.kinds()
        assert time.monotonic() - killed < 10
        assert not await engine_client.is_serving()
        refused = await engine_client.generate(request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.events == []
        load = await engine_client.load()
        assert (load.ready, load.num_requests) == (False, 0)

        assert await engine_client.wait_serving(True, 60) < 60
        assert len((await engine_client.generate(request())).tokens()) == 8
        assert await engine_client.core_pid() not in (0, pid)
        await engine_client.wait_idle(20)
        assert seen == [SERVING, NOT_SERVING, SERVING]
        watch.cancel()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frozen_core_is_not_ready_and_loses_nothing(service: EngineService) -> None:
    async with client(service.grpc_address) as engine_client:
        seen: list[int] = []
        watch = asyncio.create_task(watch_health(engine_client, seen))
        (stream,) = await start_streams(engine_client, 1)
        pid = await engine_client.core_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await engine_client.wait_serving(False, 20) > 1
            refused = await engine_client.generate(request())
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert "respond" in refused.error
        finally:
            os.kill(pid, signal.SIGCONT)
        await engine_client.wait_serving(True, 20)
        before = (await engine_client.load()).generated_tokens
        await engine_client.wait_load(lambda load: load.generated_tokens > before + 50, seconds=20)
        await engine_client.engine.Abort(pb.AbortRequest(request_id="stream-0"))
        answer = await stream
        assert answer.code is grpc.StatusCode.OK
        assert len(answer.tokens()) == answer.finished().usage.completion_tokens
        assert seen == [SERVING, NOT_SERVING, SERVING]
        watch.cancel()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_idle_frozen_core_is_noticed_too(service: EngineService) -> None:
    async with client(service.grpc_address) as engine_client:
        pid = await engine_client.core_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            await engine_client.wait_serving(False, 20)
        finally:
            os.kill(pid, signal.SIGCONT)
        await engine_client.wait_serving(True, 20)


async def test_a_core_frozen_for_good_is_replaced(model_dir: Path) -> None:
    config = roomy_config(model_dir, stall_timeout_seconds=1.5, stall_restart_seconds=3.0)
    async with EngineService(config) as service, client(service.grpc_address) as engine_client:
        (stream,) = await start_streams(engine_client, 1)
        pid = await engine_client.core_pid()
        os.kill(pid, signal.SIGSTOP)
        answer = await asyncio.wait_for(stream, 30)
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        await engine_client.wait_serving(True, 60)
        assert await engine_client.core_pid() != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_the_core_as_a_thread_serves_alike(model_dir: Path) -> None:
    config = roomy_config(model_dir, core_in_process=True)
    async with EngineService(config) as service, client(service.grpc_address) as engine_client:
        assert len((await engine_client.generate(request(n=2))).tokens(1)) == 8
        assert await engine_client.core_pid() == 0
        call = engine_client.engine.Generate(request(max_tokens=ENDLESS))
        await call.read()
        call.cancel()
        await engine_client.wait_idle(20)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # ended; its new parent has not looked yet


def test_the_core_does_not_outlive_a_killed_service(model_dir: Path, tmp_path: Path) -> None:
    with engine_process(model_dir, tmp_path) as engine:
        (core,) = children_of(engine.process.pid)
        engine.process.kill()
        engine.process.wait()
        deadline = time.monotonic() + 20
        while not is_gone(core):
            assert time.monotonic() < deadline
            time.sleep(0.02)


# ---------------------------------------------------------------- it can't start


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_service", *arguments]
    command += ["--engine-metrics-port=0"] * ("--engine-metrics-port" not in " ".join(arguments))
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one clear line; never a word that it listens, no traceback."""
    assert result.returncode == 2
    assert "listening" not in result.stdout
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


def test_no_such_model(tmp_path: Path) -> None:
    assert_refused(run_engine(str(tmp_path / "nothing"), "--grpc-port=0"), "nothing")


def test_a_model_the_core_refuses(model_dir: Path, tmp_path: Path) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace('"hidden_size": 64', '"hidden_size": 96'))
    assert_refused(run_engine(str(tmp_path), "--grpc-port=0"))


@pytest.mark.parametrize("flag", ["--grpc-port", "--engine-metrics-port"])
def test_a_port_in_use(model_dir: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = [] if flag == "--grpc-port" else ["--grpc-port=0"]
        result = run_engine(str(model_dir), f"{flag}={port}", *other)
    assert_refused(result, flag, str(port))
