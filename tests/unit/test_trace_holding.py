"""Sampling, traces that are held until somebody keeps them, and spans that are dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Span

from traces import held_spans, names, propagation
from traces.export_queue import ExportQueue
from traces.held import is_held
from traces.provider import FirstTokenProvider
from traces.setup import Tracing
from traces.span_ids import future_span, start_chosen_span

REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


class Process:
    """One provider and what it exports."""

    def __init__(self, *, ratio: float, holds: bool = False, trusts_callers: bool = False) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = FirstTokenProvider(
            "test",
            [self.exporter],
            sample_ratio=ratio,
            holds=holds,
            trusts_callers=trusts_callers,
        )
        self.tracer = self.provider.get_tracer("test")
        self.tracing = Tracing(self.provider)

    def exported(self) -> list[str]:
        self.provider.force_flush()
        return sorted(span.name for span in self.exporter.get_finished_spans())


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.provider.shutdown()


@pytest.fixture
def facade(processes: list[Process]) -> Process:
    processes.append(Process(ratio=0.0, holds=True))
    return processes[-1]


@pytest.fixture
def engine(processes: list[Process]) -> Process:
    processes.append(Process(ratio=0.0, trusts_callers=True))
    return processes[-1]


def trace_id(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def headers(span: Span) -> tuple[tuple[str, str], ...]:
    return propagation.inject(trace.set_span_in_context(span))


def test_a_slow_trace_is_kept_in_both_processes(facade: Process, engine: Process) -> None:
    root = facade.tracer.start_span("root")
    assert root.is_recording() and is_held(root.get_span_context())
    carried = dict(headers(root))
    assert int(carried["traceparent"][-2:], 16) & 1 == 0  # not sampled
    server = engine.tracer.start_span("server", context=propagation.extract(carried.items()))
    assert server.is_recording()
    engine.tracer.start_span("early", context=trace.set_span_in_context(server)).end()
    assert facade.exported() == engine.exported() == []
    for process in (facade, engine):
        process.tracing.keep(trace_id(root))
    server.end()
    root.end()
    engine.tracer.start_span("late", context=trace.set_span_in_context(server)).end()
    assert facade.exported() == ["root"]
    assert engine.exported() == ["early", "late", "server"]
    (span,) = facade.exporter.get_finished_spans()
    assert span.context.trace_flags.sampled


def test_a_fast_one_is_forgotten(facade: Process) -> None:
    root = facade.tracer.start_span("root")
    facade.tracer.start_span("child", context=trace.set_span_in_context(root)).end()
    facade.tracing.forget(trace_id(root))
    root.end()
    assert facade.exported() == []


@pytest.mark.parametrize(("flags", "expected"), [("01", ["server"]), ("00", [])])
def test_a_callers_decision_holds(facade: Process, flags: str, expected: list[str]) -> None:
    """Also that of one who says that it holds the trace: a front does not believe it."""
    sent = [("traceparent", REMOTE + flags), ("tracestate", "firsttoken=held")]
    span = facade.tracer.start_span("server", context=propagation.extract(sent))
    assert span.is_recording() is (flags == "01")
    span.end()
    facade.tracing.keep(REMOTE[3:35])
    assert facade.exported() == expected


def test_a_vendors_state_travels_on(engine: Process) -> None:
    sent = [("traceparent", REMOTE + "01"), ("tracestate", "vendor=abc")]
    span = engine.tracer.start_span("server", context=propagation.extract(sent))
    assert dict(headers(span))["tracestate"] == "vendor=abc"
    span.end()


def test_a_share_of_the_traces_is_sampled(processes: list[Process]) -> None:
    process = Process(ratio=0.3, holds=True)
    processes.append(process)
    spans = [process.tracer.start_span("root") for _ in range(1_000)]
    sampled = [span for span in spans if span.get_span_context().trace_flags.sampled]
    assert 200 < len(sampled) < 400
    assert all(is_held(span.get_span_context()) for span in spans if span not in sampled)
    for span in spans:
        span.end()
    assert len(process.exported()) == len(sampled)


def test_a_step_is_kept_with_one_of_those_it_touched(engine: Process) -> None:
    held = [("tracestate", "firsttoken=held")]
    servers = []
    for digit in "abc":
        sent = [("traceparent", f"00-{digit * 32}-{digit * 16}-00"), *held]
        servers.append(engine.tracer.start_span("server", context=propagation.extract(sent)))
    contexts = [server.get_span_context() for server in servers]
    for number, touched in enumerate((contexts[:2], contexts[2:])):
        step = engine.tracer.start_span(
            f"step {number}",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            links=[Link(context) for context in touched],
        )
        step.end()
    engine.tracing.keep("b" * 32)
    assert engine.exported() == ["step 0"]


def test_what_is_held_is_bounded(facade: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_spans, "_MAX_SPANS", 3)
    roots = [facade.tracer.start_span(f"root {number}") for number in range(5)]
    for root in roots:
        root.end()
    for root in roots:
        facade.tracing.keep(trace_id(root))
    assert facade.exported() == ["root 2", "root 3", "root 4"]


def test_what_is_old_is_no_longer_held(facade: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_spans, "_HOLD_SECONDS", -1.0)
    root = facade.tracer.start_span("root")
    root.end()
    facade.tracing.keep(trace_id(root))
    assert facade.exported() == []


class Slow(SpanExporter):
    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go_on.wait(10)
        return SpanExportResult.FAILURE if self.fails else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_dropped_spans_are_counted(fails: bool) -> None:
    exporter = Slow()
    exporter.fails = fails
    queue = ExportQueue(exporter, max_spans=10)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    for number in range(25):
        provider.get_tracer("test").start_span(f"span {number}").end()
    exporter.may_go_on.set()
    queue.force_flush()
    provider.shutdown()
    assert queue.num_dropped == (25 if fails else 15)


def test_a_span_may_be_linked_to_before_it_is(engine: Process) -> None:
    sent = [("traceparent", REMOTE + "01")]
    server = engine.tracer.start_span("server", context=propagation.extract(sent))
    future = future_span(server.get_span_context())
    parent = trace.set_span_in_context(server)
    child = start_chosen_span(engine.tracer, future, names.SPAN_QUEUE, parent, 1)
    other = engine.tracer.start_span("other", context=parent)
    assert child.get_span_context().span_id == future.span_id
    assert other.get_span_context().span_id != future.span_id
    for span in (child, other, server):
        span.end()
