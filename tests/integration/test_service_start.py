"""Between "bound" and "listening": the engine service while its core still loads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine_service import servicer
from engine_service.service import EngineService
from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import client, request, service_config

START_SECONDS = 60.0


async def test_while_the_core_loads_it_tells_its_tokenizer_and_nothing_else(
    tiny_model_dir: MakeTinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That it became ready is told at once, not with the next report.
    monkeypatch.setattr(servicer, "WATCH_LOAD_SECONDS", 1_000.0)
    seen: list[str] = []
    watchers: list[asyncio.Task[None]] = []

    def on_bound(service: EngineService) -> None:
        watchers.append(asyncio.create_task(visit(service.grpc_address, seen)))

    config = service_config(tiny_model_dir("llama"))
    async with EngineService(config, on_bound=on_bound):
        await asyncio.wait_for(watchers[0], 30)
    assert seen == ["not ready", "no model", "refused", "tokenizer", "ready", "model"]


async def visit(address: str, seen: list[str]) -> None:
    """A client from the first moment, until it was told that the engine is ready."""
    async with client(address) as engine_client:
        reports = engine_client.engine.WatchLoad(pb.WatchLoadRequest())
        seen.append("ready" if (await next_report(reports)).ready else "not ready")
        seen.append("model" if await has_model(address) else "no model")
        answer = await engine_client.generate(request())
        seen.append("refused" if answer.code is grpc.StatusCode.UNAVAILABLE else "answered")
        files = engine_client.engine.GetTokenizer(pb.GetTokenizerRequest())
        data = [chunk.data async for chunk in files]
        seen.append("tokenizer" if b'"vocab"' in b"".join(data) else "no tokenizer")
        while not (await next_report(reports)).ready:
            pass
        seen.append("ready")
        seen.append("model" if await has_model(address) else "no model")
        reports.cancel()


async def next_report(
    reports: grpc.aio.UnaryStreamCall[pb.WatchLoadRequest, pb.LoadReport],
) -> pb.LoadReport:
    report = await asyncio.wait_for(reports.read(), START_SECONDS)
    assert isinstance(report, pb.LoadReport)
    return report


async def has_model(address: str) -> bool:
    async with client(address) as engine_client:
        try:
            await engine_client.engine.GetModelInfo(pb.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


def has_mapped(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


async def test_a_core_loads_nothing_for_grammars_until_one_comes(
    tiny_model_dir: MakeTinyModel,
) -> None:
    """Seen from outside, in what the process has mapped."""
    async with (
        EngineService(service_config(tiny_model_dir("llama"))) as service,
        client(service.grpc_address) as engine_client,
    ):
        pid = await engine_client.core_pid()
        assert (await engine_client.generate(request(max_tokens=2))).code is grpc.StatusCode.OK
        assert not has_mapped(pid, "xgrammar")
        message = request(max_tokens=4)
        message.structured_output.json_object = True
        answer = await engine_client.generate(message)
        assert answer.code is grpc.StatusCode.OK
        assert has_mapped(pid, "xgrammar")
