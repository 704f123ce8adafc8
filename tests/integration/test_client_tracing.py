"""One CLIENT span per rpc, a child of the caller's span, ended however the call ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from clients import ClientOptions, EngineUnavailable, Finished, InternalError, rpc_span
from clients.testing import Accept, Emit, Fail, Hang, Script
from tests.client_pair import all_events, connected, prompt
from traces import names

Spans = InMemorySpanExporter


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """Of this test alone: the process's own provider can be set only once."""
    provider = TracerProvider()
    monkeypatch.setattr(rpc_span, "_tracer", provider.get_tracer("firsttoken.clients"))
    yield provider
    provider.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> Spans:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def _one(spans: Spans) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time
    return span


def _attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes.get(name)


async def test_a_generation_is_a_client_span_under_the_callers(
    provider: TracerProvider, spans: Spans
) -> None:
    tracer = provider.get_tracer("test")
    async with connected() as (fake, client):
        parent = tracer.start_span("caller")
        with trace.use_span(parent):
            stream = client.generate(prompt("mine"))
        await all_events(stream)  # elsewhere: the parent is that of generate()
        span = _one(spans)
        assert span.name == "firsttoken.v1.Engine/Generate"
        assert span.kind is SpanKind.CLIENT
        assert span.parent is not None
        assert span.parent.span_id == parent.get_span_context().span_id
        host, _, port = fake.target.rpartition(":")
        assert dict(span.attributes or {}) == {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: "firsttoken.v1.Engine",
            names.RPC_METHOD: "Generate",
            names.RPC_GRPC_STATUS_CODE: 0,
            names.REQUEST_ID: "mine",
            names.SERVER_ADDRESS: host,
            names.SERVER_PORT: int(port),
        }
        assert span.status.status_code is StatusCode.UNSET
        assert (
            fake.calls[0]
            .metadata["traceparent"]
            .startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-")
        )


async def test_each_attempt_has_its_span(spans: Spans) -> None:
    async with connected() as (fake, client):
        fake.script(Script.failing(EngineUnavailable("down")), Script.of_tokens((1,)))
        await all_events(client.generate(prompt("mine")))
        failed, succeeded = spans.get_finished_spans()
        assert _attribute(failed, names.RPC_GRPC_STATUS_CODE) == 14
        assert failed.status.status_code is StatusCode.ERROR
        assert _attribute(failed, names.ERROR_TYPE) == "UNAVAILABLE"
        assert _attribute(succeeded, names.RPC_GRPC_STATUS_CODE) == 0
        assert _attribute(succeeded, names.REQUEST_ID) == "mine-r2"
        first, second = (call.metadata["traceparent"] for call in fake.calls)
        assert first != second


async def test_a_failure_ends_the_span(spans: Spans) -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1,)), Fail(InternalError("a fault")))))
        with pytest.raises(InternalError):
            await all_events(client.generate(prompt()))
        assert _attribute(_one(spans), names.RPC_GRPC_STATUS_CODE) == 13
        assert _one(spans).status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("is_failure", [False, True])
async def test_leaving_ends_the_span(spans: Spans, is_failure: bool) -> None:
    """Left on purpose (a stop string matched) is no error; left by a cancelled task is one."""
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Emit((1,)), Hang())))
        if is_failure:
            reading = asyncio.create_task(all_events(client.generate(prompt())))
            await fake.wait_for_calls(1)
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait((reading,))
        else:
            async with client.generate(prompt()) as stream:
                await stream.wait_accepted()
        span = _one(spans)
        assert _attribute(span, names.RPC_GRPC_STATUS_CODE) == 1
        expected = StatusCode.ERROR if is_failure else StatusCode.UNSET
        assert span.status.status_code is expected


async def test_leaving_after_the_last_event_is_a_success(spans: Spans) -> None:
    async with connected() as (_, client):
        async with client.generate(prompt()) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    break
        assert _attribute(_one(spans), names.RPC_GRPC_STATUS_CODE) == 0


async def test_a_token_that_fails_ends_the_span(spans: Spans) -> None:
    async with connected(ClientOptions(token="not a token")) as (_, client):
        with pytest.raises(ValueError, match="printable ASCII"):
            await all_events(client.generate(prompt()))
        assert _one(spans).status.status_code is StatusCode.ERROR


async def test_no_context_leaks_between_streams(provider: TracerProvider, spans: Spans) -> None:
    tracer = provider.get_tracer("test")
    async with connected() as (fake, client):
        fake.script(Script.of_tokens(range(10), delay_seconds=0.005))

        async def run(number: int) -> tuple[str, int]:
            parent = tracer.start_span(f"caller {number}")
            with trace.use_span(parent):
                async for _ in client.generate(prompt(f"stream-{number}")):
                    assert trace.get_current_span() is parent
            return f"stream-{number}", parent.get_span_context().trace_id

        traces = dict(await asyncio.gather(*(run(number) for number in range(8))))
        assert trace.get_current_span() is trace.INVALID_SPAN
        for span in spans.get_finished_spans():
            assert span.context.trace_id == traces[str(_attribute(span, names.REQUEST_ID))]
        for call in fake.calls:
            assert (
                int(call.metadata["traceparent"].split("-")[1], 16)
                == traces[call.request.request_id]
            )


async def test_calls_about_the_engine_start_no_trace_but_join_one(
    provider: TracerProvider, spans: Spans
) -> None:
    async with connected() as (_, client):
        await client.wait_ready(5.0)
        await client.get_load()
        await client.get_tokenizer()
        assert spans.get_finished_spans() == ()
        with trace.use_span(provider.get_tracer("test").start_span("caller")):
            await client.get_load()
        assert _attribute(_one(spans), names.RPC_METHOD) == "GetLoad"


async def test_without_an_sdk_the_callers_context_still_travels() -> None:
    context = trace.SpanContext(
        trace_id=0x1234, span_id=0x5678, is_remote=True, trace_flags=trace.TraceFlags(0)
    )
    async with connected() as (fake, client):
        with trace.use_span(trace.NonRecordingSpan(context)):
            await all_events(client.generate(prompt()))
        await all_events(client.generate(prompt()))
        with_context, without = fake.calls
        assert with_context.metadata["traceparent"] == f"00-{0x1234:032x}-{0x5678:016x}-00"
        assert "traceparent" not in without.metadata


async def test_a_dropped_stream_ends_its_span(spans: Spans) -> None:
    async with connected() as (fake, client):
        fake.script(Script((Accept(), Hang())))
        stream = client.generate(prompt())
        await stream.wait_accepted()
        del stream

        gc.collect()
        assert _one(spans).status.status_code is StatusCode.ERROR
