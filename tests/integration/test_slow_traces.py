"""Traces that begin at the facade and are not sampled: the slow ones of them are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clients import rpc_span
from tests.facade_harness import CHAT, COMPLETIONS, Harness, body_for, facade_and_fake
from traces.provider import FirstTokenProvider

SLOW_SECONDS = 0.15
REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class Bench:
    def __init__(self, harness: Harness, provider: FirstTokenProvider) -> None:
        self.harness = harness
        self.provider = provider

    @property
    def kept_by_the_engine(self) -> list[str]:
        return self.harness.fake.kept_traces

    async def ask(
        self, delay_seconds: float, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> str:
        """The trace id that the engine was told."""
        self.harness.reset()
        self.harness.fake.kept_traces.clear()
        self.harness.say("Some words", delay_seconds=delay_seconds)
        await self.harness.stream(path, body_for(path), headers)
        await asyncio.sleep(0.2)  # for the engine to be told
        traceparent: str = self.harness.fake.calls[0].metadata["traceparent"]
        return traceparent.split("-")[1]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def bench(
    embedded_model_dir: Path,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Bench]:
    """Its parameter: seconds from which a first token is slow."""
    slow_seconds: float = getattr(request, "param", SLOW_SECONDS)
    provider = FirstTokenProvider(
        "facade", [spans], sample_ratio=0.0, holds=True, trusts_callers=False
    )
    monkeypatch.setattr(rpc_span, "_tracer", provider.get_tracer("firsttoken.clients"))
    async with facade_and_fake(
        embedded_model_dir, tracer_provider=provider, trace_slow_ttft_ms=slow_seconds * 1000
    ) as harness:
        yield Bench(harness, provider)
    provider.shutdown()


async def exported(bench: Bench, spans: InMemorySpanExporter) -> dict[str, str]:
    """Trace ids by span name."""
    await asyncio.to_thread(bench.provider.force_flush)
    return {span.name: f"{span.context.trace_id:032x}" for span in spans.get_finished_spans()}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_slow_first_token_keeps_its_trace_here_and_at_the_engine(
    bench: Bench, spans: InMemorySpanExporter, path: str
) -> None:
    trace_id = await bench.ask(2 * SLOW_SECONDS, path)
    wanted = {f"POST {path}", "tokenize", "first_write", "firsttoken.v1.Engine/Generate"}
    deadline = time.monotonic() + 10
    while not (wanted <= (names := await exported(bench, spans)).keys()) or (
        not bench.kept_by_the_engine
    ):
        assert time.monotonic() < deadline, names
        await asyncio.sleep(0.05)
    assert set(names.values()) == {trace_id}
    assert bench.kept_by_the_engine == [trace_id]


@pytest.mark.parametrize("bench", [60.0], indirect=True)
async def test_a_fast_one_leaves_nothing(bench: Bench, spans: InMemorySpanExporter) -> None:
    await bench.ask(0.0)
    assert await exported(bench, spans) == {}
    assert bench.kept_by_the_engine == []


async def test_a_slow_one_that_the_caller_did_not_sample_leaves_nothing(
    bench: Bench, spans: InMemorySpanExporter
) -> None:
    headers = {"traceparent": REMOTE, "tracestate": "firsttoken=held"}
    await bench.ask(2 * SLOW_SECONDS, headers=headers)
    assert await exported(bench, spans) == {}
    assert bench.kept_by_the_engine == []
