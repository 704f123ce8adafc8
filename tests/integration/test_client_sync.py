"""The synchronous twin, on threads beside the event loop that the scripted engine runs on."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from opentelemetry import trace

from clients import (
    CallCancelled,
    ClientOptions,
    Delta,
    Finished,
    GenerateRequest,
    InvalidRequest,
    QueueFull,
    SyncEngineClient,
)
from clients.testing import Accept, Emit, FakeEngine, Hang, Outcome, Script
from tests.client_pair import prompt

ENDLESS = Script((Accept(), Emit((1,)), Hang()))


def _threads() -> int:
    return sum(thread.name == "firsttoken-client" for thread in threading.enumerate())


async def test_every_call_works() -> None:
    def use(target: str) -> None:
        with SyncEngineClient(target) as client:
            client.wait_ready(30)
            assert client.get_model_info().model == "fake"
            assert client.get_server_info().device == "fake"
            assert client.get_load().ready
            assert client.get_tokenizer() is not None
            client.abort("unknown")
            with client.generate(prompt("mine"), timeout=30.0) as stream:
                assert stream.request_id == "mine"
                assert stream.wait_accepted() is stream.accepted
                events = list(stream)
                assert events[0] is stream.accepted
                assert isinstance(events[-1], Finished)
                assert stream.usage == events[-1].usage
            with contextlib.closing(client.watch_health()) as states:
                assert next(states) is True
            with contextlib.closing(client.watch_load()) as reports:
                assert next(reports).ready
            assert _threads() == 1
        assert _threads() == 0

    async with FakeEngine() as fake:
        await asyncio.to_thread(use, fake.target)
        assert fake.num_open_calls == 0


async def test_leaving_early_cancels() -> None:
    def use(target: str) -> None:
        with SyncEngineClient(target) as client:
            with client.generate(prompt()) as stream:
                for event in stream:
                    if isinstance(event, Delta):
                        break
            client.get_load()

    async with FakeEngine() as fake:
        fake.script(ENDLESS)
        using = asyncio.create_task(asyncio.to_thread(use, fake.target))
        (call,) = await fake.wait_for_calls(1)
        assert await call.wait_closed() is Outcome.CANCELLED
        await using


async def test_closing_wakes_a_reader_on_another_thread() -> None:
    def read(client: SyncEngineClient) -> None:
        with client.generate(prompt()) as stream:
            list(stream)

    async with FakeEngine() as fake:
        fake.script(ENDLESS)
        client = SyncEngineClient(fake.target)
        reading = asyncio.create_task(asyncio.to_thread(read, client))
        (call,) = await fake.wait_for_calls(1)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(client.close)
        with pytest.raises(CallCancelled):
            await asyncio.wait_for(reading, 10)
        assert await call.wait_closed() is Outcome.CANCELLED
        for _ in range(2):
            await asyncio.to_thread(client.close)
        with pytest.raises(CallCancelled, match="closed"):
            await asyncio.to_thread(client.get_load)


async def test_streams_on_several_threads_do_not_mix() -> None:
    def read(client: SyncEngineClient, start: int) -> list[int]:
        with client.generate(GenerateRequest(prompt=(start,))) as stream:
            return [t for event in stream if isinstance(event, Delta) for t in event.token_ids]

    def script(request: GenerateRequest) -> Script:
        assert not isinstance(request.prompt, str)
        return Script.of_tokens(range(request.prompt[0], request.prompt[0] + 30))

    async with FakeEngine() as fake:
        fake.script(script)
        client = SyncEngineClient(fake.target)
        reads = (asyncio.to_thread(read, client, start) for start in (0, 100, 200, 300))
        for start, token_ids in zip((0, 100, 200, 300), await asyncio.gather(*reads), strict=True):
            assert token_ids == list(range(start, start + 30))
        await asyncio.to_thread(client.close)


async def test_the_callers_trace_context_travels() -> None:
    context = trace.SpanContext(
        trace_id=0x77, span_id=0x88, is_remote=True, trace_flags=trace.TraceFlags(1)
    )

    def use(target: str) -> None:
        with SyncEngineClient(target) as client, trace.use_span(trace.NonRecordingSpan(context)):
            list(client.generate(prompt()))

    async with FakeEngine() as fake:
        await asyncio.to_thread(use, fake.target)
        assert fake.calls[0].metadata["traceparent"].startswith(f"00-{0x77:032x}-")


async def test_errors_are_the_same() -> None:
    def use(target: str) -> None:
        with SyncEngineClient(target, options=ClientOptions(max_attempts=1)) as client:
            with pytest.raises(InvalidRequest):
                client.generate(GenerateRequest(prompt=(-1,)))
            with pytest.raises(QueueFull) as refusal, client.generate(prompt("mine")) as stream:
                next(stream)
            assert refusal.value.request_id == "mine"

    async with FakeEngine() as fake:
        fake.script(Script.failing(QueueFull("full", retry_after_seconds=1.0)))
        await asyncio.to_thread(use, fake.target)
