"""The trace store, propagation, clock and set-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from traces import clock, file_store, names, propagation
from traces.file_store import FileSpanExporter, StoreLimits
from traces.setup import configure_tracing, trace_directory
from traces.stored_spans import read_spans

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def make_tracer() -> Iterator[Callable[[FileSpanExporter], trace.Tracer]]:
    """Tracers of their own providers, which are shut down at the end."""
    providers: list[TracerProvider] = []

    def make(exporter: FileSpanExporter) -> trace.Tracer:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        providers.append(provider)
        return provider.get_tracer("test")

    yield make
    for provider in providers:
        provider.shutdown()


MakeTracer = Callable[[FileSpanExporter], trace.Tracer]


def test_a_span_is_stored_whole(tmp_path: Path, make_tracer: MakeTracer) -> None:
    tracer = make_tracer(FileSpanExporter(tmp_path, "facade"))
    parent = propagation.extract([("traceparent", TRACEPARENT)])
    with tracer.start_as_current_span("outer", context=parent) as outer:
        outer.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, ["stop", "length"])
        with tracer.start_as_current_span(names.SPAN_PREFILL) as inner:
            inner.add_event(names.EVENT_PREFILL_CHUNK, {names.CHUNK_TOKENS: 256})
            inner.set_status(trace.StatusCode.ERROR, "cut")

    spans = {span["name"]: span for span in read_spans(tmp_path)}
    assert set(spans) == {"outer", "prefill"}
    assert spans["outer"]["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert spans["outer"]["parent_span_id"] == "00f067aa0ba902b7"
    assert spans["outer"]["attributes"] == {
        names.GEN_AI_RESPONSE_FINISH_REASONS: ["stop", "length"]
    }
    assert spans["prefill"]["parent_span_id"] == spans["outer"]["span_id"]
    assert spans["prefill"]["events"][0]["attributes"] == {names.CHUNK_TOKENS: 256}
    assert spans["prefill"]["status"] == {"code": "ERROR", "message": "cut"}
    assert spans["prefill"]["end_unix_ns"] >= spans["prefill"]["start_unix_ns"]
    assert (spans["outer"]["service"], spans["outer"]["pid"]) == ("facade", os.getpid())


def test_reading_by_trace_id_and_past_a_torn_line(tmp_path: Path, make_tracer: MakeTracer) -> None:
    tracer = make_tracer(FileSpanExporter(tmp_path, "facade"))
    for _ in range(2):
        tracer.start_span("one").end()
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as out:
        out.write('{"trace_id": "torn')
    everything = list(read_spans(tmp_path))
    assert len(everything) == 2
    wanted = everything[1]["trace_id"]
    assert [span["trace_id"] for span in read_spans(tmp_path, wanted)] == [wanted]


def test_files_rotate_by_size_and_the_oldest_go(tmp_path: Path, make_tracer: MakeTracer) -> None:
    limits = StoreLimits(file_bytes=2_000, max_files=3)
    tracer = make_tracer(FileSpanExporter(tmp_path, "engine", limits))
    for number in range(40):
        tracer.start_span(f"span {number}").end()
        for path in tmp_path.glob("*.jsonl"):  # distinct ages without waiting
            stamp = path.stat().st_mtime - 1
            os.utime(path, (stamp, stamp))
    files = list(tmp_path.glob("*.jsonl"))
    assert len(files) <= 3
    assert all(path.stat().st_size < 3_000 for path in files)
    assert "span 39" in {span["name"] for span in read_spans(tmp_path)}


def test_files_past_the_age_limit_are_removed_but_those_of_others(
    tmp_path: Path, make_tracer: MakeTracer
) -> None:
    ours, theirs = tmp_path / "engine-1.jsonl", tmp_path / "train-00001.jsonl"
    ours.write_text('{"trace_id": "1"}\n')
    theirs.write_text('{"text": "a data set"}\n')
    stamp = time.time() - 10_000
    for path in (ours, theirs):
        os.utime(path, (stamp, stamp))
    limits = StoreLimits(max_age_seconds=5_000, max_files=1)
    make_tracer(FileSpanExporter(tmp_path, "facade", limits)).start_span("new").end()
    assert theirs.exists() and not ours.exists()


def test_a_store_that_is_emptied_meanwhile_fills_again(
    tmp_path: Path, make_tracer: MakeTracer
) -> None:
    tracer = make_tracer(FileSpanExporter(tmp_path, "facade"))
    tracer.start_span("before").end()
    for path in tmp_path.iterdir():
        path.unlink()
    tracer.start_span("after").end()
    assert [span["name"] for span in read_spans(tmp_path)] == ["after"]


def test_processes_of_one_pid_lose_no_file_to_each_other(
    tmp_path: Path, make_tracer: MakeTracer
) -> None:
    """As in containers, where a process often has the pid of the one before it, or beside it."""
    limits = StoreLimits(file_bytes=1_000, max_files=1_000)
    tracers = [make_tracer(FileSpanExporter(tmp_path, "engine", limits)) for _ in range(2)]
    for number, turn in enumerate([0] * 20 + [1] * 20 + [0, 1] * 20):
        tracers[turn].start_span(f"span {number}").end()
    stored = sorted(int(span["name"].split()[1]) for span in read_spans(tmp_path))
    assert stored == list(range(80))


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, make_tracer: MakeTracer) -> None:
    (tmp_path / f"engine-{os.getpid()}.jsonl").write_text('{"trace_id": "torn')
    make_tracer(FileSpanExporter(tmp_path, "engine")).start_span("whole").end()
    assert [span["name"] for span in read_spans(tmp_path)] == ["whole"]


def test_a_write_that_takes_only_a_part_is_gone_on_with(
    tmp_path: Path, make_tracer: MakeTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reluctant(FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:100])

    monkeypatch.setattr(file_store, "FileIO", Reluctant)
    make_tracer(FileSpanExporter(tmp_path, "engine")).start_span("whole").end()
    assert [span["name"] for span in read_spans(tmp_path)] == ["whole"]


def test_a_vanished_directory_loses_spans_and_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    exporter = FileSpanExporter(blocked / "traces", "facade")
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("lost")
    span.end()
    assert exporter.export([span]) is SpanExportResult.FAILURE  # type: ignore[list-item]
    blocked.unlink()
    assert exporter.export([span]) is SpanExportResult.SUCCESS  # type: ignore[list-item]
    exporter.shutdown()


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-1-2-3",
    ],
)
def test_a_malformed_traceparent_is_no_parent(value: str) -> None:
    context = propagation.extract([("traceparent", value)])
    assert not trace.get_current_span(context).get_span_context().is_valid


def test_trace_context_survives_the_wire_with_state_and_flags() -> None:
    incoming: list[tuple[str, str | bytes]] = [
        ("TraceParent", TRACEPARENT[:-2] + "00"),
        ("tracestate", "vendor=abc"),
        ("binary-bin", b"\x00"),
    ]
    carried = dict(propagation.inject(propagation.extract(incoming)))
    assert carried == {
        "traceparent": TRACEPARENT[:-2] + "00",
        "tracestate": "vendor=abc",
    }


def test_extract_ignores_the_ambient_span() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("someone else's request"):
        context = propagation.extract([])
        assert not trace.get_current_span(context).get_span_context().is_valid


def test_clock_keeps_monotonic_distances() -> None:
    before, now, after = time.time_ns(), time.monotonic_ns(), time.time_ns()
    assert clock.unix_ns(now + 5) - clock.unix_ns(now) == 5
    assert before - 1_000_000_000 < clock.unix_ns(now) < after + 1_000_000_000


def test_tracing_without_a_target_never_imports_the_sdk() -> None:
    code = (
        "import sys; from traces.setup import configure_tracing; import traces.propagation;"
        "configure_tracing('x', directory=None, otlp_endpoint=None, sample_ratio=1.0).shutdown();"
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_configured_process_writes_on_shutdown_and_keeps_the_parents_decision(
    tmp_path: Path,
) -> None:
    code = """
import sys
from opentelemetry import trace
from traces.propagation import extract
from traces.setup import configure_tracing
tracing = configure_tracing('engine', directory=sys.argv[1], otlp_endpoint=None, sample_ratio=0.0)
tracer = trace.get_tracer('t')
for flag in ('01', '00'):
    parent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-' + flag
    tracer.start_span('flag ' + flag, context=extract([('traceparent', parent)])).end()
tracer.start_span('root, ratio 0').end()
tracing.shutdown()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [span["name"] for span in read_spans(tmp_path)] == ["flag 01"]


def test_a_dead_collector_delays_no_span(tmp_path: Path) -> None:
    code = """
import sys, time
from opentelemetry import trace
from traces.setup import configure_tracing
nobody = 'http://127.0.0.1:9'
configure_tracing('engine', directory=sys.argv[1], otlp_endpoint=nobody, sample_ratio=1.0)
tracer = trace.get_tracer('t')
began = time.monotonic()
for _ in range(5000):
    tracer.start_span('x').end()
print(time.monotonic() - began, flush=True)
import os; os._exit(0)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert float(run.stdout) < 30.0  # to wait for it each time would take hours


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        configure_tracing("x", directory=None, otlp_endpoint=None, sample_ratio=ratio)


def test_names_are_frozen() -> None:
    """Dashboards and the explainer rely on them: change this file knowingly."""
    constants = {key: value for key, value in vars(names).items() if key.isupper()}
    values = list(constants.values())
    assert len(values) == len(set(values))
    assert all(
        value.startswith(("gen_ai.", "rpc.", "http.", "url.", "server.", "error.", "firsttoken."))
        for key, value in constants.items()
        if not key.startswith(("SPAN_", "EVENT_"))
    )
    assert json.loads(json.dumps(constants)) == constants


def test_the_store_is_where_flag_environment_or_cache_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_directory("/flag") == "/flag"
    assert trace_directory(None) is None  # the tests' environment says none
    monkeypatch.setenv("FIRSTTOKEN_TRACE_DIR", "/environment")
    assert trace_directory(None) == "/environment"
    assert trace_directory("none") is None
    monkeypatch.delenv("FIRSTTOKEN_TRACE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert trace_directory(None) == "/cache/firsttoken/traces"
