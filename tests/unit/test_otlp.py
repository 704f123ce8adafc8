"""OTLP endpoints and protocols; a collector that is slow, or gone, costs spans and nothing else."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry import trace

from tests.otlp_receiver import http_receiver
from traces import names, setup
from traces.file_store import FileSpanExporter
from traces.otlp import GRPC, HTTP, OtlpTarget, otlp_exporter, otlp_flag, otlp_target
from traces.provider import FirstTokenProvider
from traces.setup import Tracing
from traces.stored_spans import read_spans


@pytest.mark.parametrize(
    ("endpoint", "told", "target"),
    [
        ("collector:4317", "", OtlpTarget(GRPC, "http://collector:4317")),
        ("http://collector:4317", "", OtlpTarget(GRPC, "http://collector:4317")),
        ("https://collector:4317", "grpc", OtlpTarget(GRPC, "https://collector:4317")),
        ("http://c:4318/v1/traces", "", OtlpTarget(HTTP, "http://c:4318/v1/traces")),
        ("http://c:4318", "http/protobuf", OtlpTarget(HTTP, "http://c:4318/v1/traces")),
        ("https://c/", "http/protobuf", OtlpTarget(HTTP, "https://c/v1/traces")),
        ("[::1]:4317", "", OtlpTarget(GRPC, "http://[::1]:4317")),
    ],
)
def test_the_protocol_is_told_by_the_variable_or_the_path(
    endpoint: str, told: str, target: OtlpTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", told)
    assert otlp_target(endpoint) == target


@pytest.mark.parametrize(
    ("endpoint", "told", "says"),
    [
        ("ftp://collector:4317", "", "http or https"),
        ("http://", "", "HOST:PORT"),
        ("collector:port", "", "HOST:PORT"),
        ("collector", "", "port"),
        ("http://c:4318/v1/traces", "grpc", "no path"),
        ("c:4317", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf"),
    ],
)
def test_what_is_no_endpoint_is_refused(
    endpoint: str, told: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", told)
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        otlp_flag(endpoint)


def test_the_variable_for_traces_goes_before_the_common_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert otlp_target("c:4318").protocol == HTTP
    assert otlp_flag("") is None


def provider_of(directory: Path, endpoint: str) -> FirstTokenProvider:
    return FirstTokenProvider(
        "facade",
        [FileSpanExporter(directory, "facade"), otlp_exporter(endpoint)],
        sample_ratio=1.0,
        holds=False,
        trusts_callers=False,
    )


def make_spans(tracer: trace.Tracer, number: int) -> None:
    for _ in range(number):
        with tracer.start_as_current_span("outer", kind=trace.SpanKind.SERVER) as outer:
            outer.set_attributes({names.PROMPT_TOKENS: 7, names.STREAM: True, "share": 0.5})
            outer.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, ["stop", "length"])
            link = trace.Link(outer.get_span_context())
            with tracer.start_as_current_span(names.SPAN_PREFILL, links=[link]) as inner:
                inner.add_event(names.EVENT_PREFILL_CHUNK, {names.CHUNK_TOKENS: 256})
                inner.set_status(trace.StatusCode.ERROR, "cut")


def test_over_http_a_collector_gets_what_the_store_gets(tmp_path: Path) -> None:
    with http_receiver() as (endpoint, received):
        provider = provider_of(tmp_path, endpoint)
        make_spans(provider.get_tracer("test"), 3)
        Tracing(provider).shutdown()
        stored = {span["span_id"]: span for span in read_spans(tmp_path)}
        assert len(stored) == 6
        assert received.spans() == stored
        assert provider.num_dropped_spans == 0


def test_a_collector_that_never_answers_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(setup, "_LAST_EXPORT_SECONDS", 0.5)
    with http_receiver() as (endpoint, received):
        received.answers.clear()
        provider = provider_of(tmp_path, endpoint)
        tracer = provider.get_tracer("test")
        began = time.monotonic()
        make_spans(tracer, 2_000)
        until(lambda: received.num_hanging == 1)
        make_spans(tracer, 4_000)  # more than are held for it
        assert time.monotonic() - began < 20  # of its 60
        until(lambda: len(list(read_spans(tmp_path))) == 12_000)  # the store has them all
        assert provider.num_dropped_spans >= 12_000 - 8_192
        began = time.monotonic()
        Tracing(provider).shutdown()
        assert time.monotonic() - began < 10


def test_a_collector_that_is_gone_loses_its_spans_and_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with http_receiver() as (endpoint, _):
        pass
    provider = provider_of(tmp_path, endpoint)
    make_spans(provider.get_tracer("test"), 5)
    until(lambda: provider.num_dropped_spans == 10)
    Tracing(provider).shutdown()
    assert len(list(read_spans(tmp_path))) == 10


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
