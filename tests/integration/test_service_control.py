"""Control on the running engine service: its credential, a flush, a drain, the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients import (
    Accepted,
    ClientOptions,
    EngineClient,
    EngineUnavailable,
    Finished,
    FinishReason,
    GenerateRequest,
    GenerateStream,
    PermissionDenied,
    PrefillProgress,
    StoppingCriteria,
)
from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Engine,
    engine_process,
)
from tests.serving import Served

ADMIN_KEY = "correct-horse"
ADMIN = ClientOptions(admin_key=ADMIN_KEY)


@pytest.fixture(scope="module")
def engine(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    work_dir = tmp_path_factory.mktemp("control")
    with engine_process(tiny_model_dir("llama"), work_dir, f"--admin-key={ADMIN_KEY}") as running:
        yield running


def prompt(first: int, max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(
        prompt=range(first, first + 64),
        stopping=StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
    )


async def finished(client: EngineClient, request: GenerateRequest) -> Finished:
    async with client.generate(request) as stream:
        return await last(stream)


async def last(stream: GenerateStream) -> Finished:
    return [event async for event in stream if isinstance(event, Finished)][-1]


async def completion_tokens(stream: GenerateStream) -> int:
    return (await last(stream)).usage.completion_tokens


def control(engine: Engine, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FIRSTTOKEN_ADMIN_KEY": key}
    command = [sys.executable, "-m", "clients", "control", *arguments, f"--engine={engine.grpc}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


async def test_a_flush_makes_the_next_prompt_cold(engine: Engine) -> None:
    async with EngineClient(engine.grpc, options=ADMIN) as client:
        cached = [(await finished(client, prompt(5))).usage.cached_tokens for _ in range(2)]
        assert cached[0] == 0
        assert cached[1] >= 48
        assert await client.flush_prefix_cache() >= 4
        assert (await client.get_load()).cached_blocks == 0
        assert (await finished(client, prompt(5))).usage.cached_tokens == 0
        assert (await finished(client, prompt(5))).usage.cached_tokens >= 48


async def test_a_flush_leaves_what_runs_alone(engine: Engine) -> None:
    async with EngineClient(engine.grpc, options=ADMIN) as client:
        await client.flush_prefix_cache()
        async with client.generate(prompt(200, max_tokens=400)) as running:
            assert isinstance(await anext(running), Accepted)
            assert isinstance(await anext(running), PrefillProgress)
            await client.flush_prefix_cache()
            assert (await finished(client, prompt(200))).usage.cached_tokens == 0
            assert await completion_tokens(running) == 400


@pytest.mark.parametrize("key", [None, "", "wrong", ADMIN_KEY + "x", ADMIN_KEY[:-1]])
async def test_only_the_admin_key_opens_control(engine: Engine, key: str | None) -> None:
    options = ClientOptions(token=ADMIN_KEY, admin_key=key or None)
    async with EngineClient(engine.grpc, options=options) as client:
        for call in (client.flush_prefix_cache, client.drain):
            with pytest.raises(PermissionDenied) as caught:
                await call()
            assert caught.value.reason == "PERMISSION_DENIED"
        assert (await client.get_load()).ready


def test_the_command_line_flushes(engine: Engine) -> None:
    answer = control(engine, "flush", key=ADMIN_KEY)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("flushed; blocks that held a cached prefix: ")
    refused = control(engine, "flush", key="wrong")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: Control takes the engine's admin key, as bearer token\n"
    assert control(engine, "burn").returncode == 2


async def test_a_drain_finishes_what_runs_and_ends_the_service(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    key = f"--admin-key={ADMIN_KEY}"
    flags = (key, "--shutdown-timeout=90", ROOM_FOR_ENDLESS)
    with engine_process(tiny_model_dir("llama", **LONG_CONTEXT), tmp_path, *flags) as engine:
        async with EngineClient(engine.grpc, options=ADMIN) as client:
            async with client.generate(prompt(5, max_tokens=ENDLESS)) as running:
                await running.wait_accepted()
                assert await client.drain() == 1
                assert not (await client.get_load()).ready
                engine.process.terminate()  # as an orchestrator does next; a second one would cut
                with pytest.raises(EngineUnavailable):
                    await finished(client, prompt(5))
                await client.abort(running.request_id)
                assert (await last(running)).reason is FinishReason.ABORT
            exit_code = await asyncio.wait_for(asyncio.to_thread(engine.process.wait), 45)
        assert exit_code == 0


async def test_without_a_configured_key_nobody_gets_in(served: Served) -> None:
    for options in (ClientOptions(), ADMIN):
        async with EngineClient(served.grpc, options=options) as client:
            for call in (client.flush_prefix_cache, client.drain):
                with pytest.raises(PermissionDenied, match="no admin key"):
                    await call()
            assert (await client.get_load()).ready
