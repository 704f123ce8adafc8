"""The facade as a process, and what surrounds every route: keys, metrics, log lines, spans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from access.keys import plain_keys
from clients.errors import OutOfMemory
from clients.testing import Accept, Emit, FakeEngine, Hang, Pause, Progress, Script
from clients.text.tokenizer import Tokenizer
from http_facade.edge import EdgeConfig
from http_facade.facade import Facade
from http_facade.metrics import FacadeMetrics
from http_facade.server import RunningFacade
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Harness,
    body_for,
    chat,
    check_envelope,
    facade_and_fake,
    text_of,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


# ---------------------------------------------------------------- the process


@contextlib.asynccontextmanager
async def process(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "http_facade", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


@contextlib.asynccontextmanager
async def process_and_fake(
    model_dir: Path, *args: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Harness]]:
    async with (
        FakeEngine(model_dir, model=MODEL) as fake,
        process("--engine", fake.target, "--port", "0", *args) as running,
    ):
        assert running.stdout is not None
        line = json.loads(await asyncio.wait_for(running.stdout.readline(), 30))
        assert set(line) == {"event", "http"} and line["event"] == "listening"
        port = int(line["http"].rsplit(":", 1)[1])
        tok = Tokenizer.from_files(fake.tokenizer.files)
        harness = Harness(fake, _remote(port), tok)
        await harness.wait_ready()
        yield running, harness


def _remote(port: int) -> RunningFacade:
    nothing: Facade = None  # type: ignore[assignment]  # it lives in the other process
    return RunningFacade(nothing, "127.0.0.1", port)


async def test_sigterm_lets_streams_finish_and_refuses_new_ones(embedded_model_dir: Path) -> None:
    async with process_and_fake(embedded_model_dir) as (running, facade):
        ids = facade.say("one two three four five six seven eight", delay_seconds=0.5)
        streaming = asyncio.create_task(facade.stream(CHAT, chat()))
        whole = asyncio.create_task(facade.post(CHAT, chat()))
        await facade.fake.wait_for_calls(2)
        running.send_signal(signal.SIGTERM)
        await until_unready(facade)
        assert (await facade.get("/healthz"))[0] == 200
        assert b"http_server_active_requests" in (await facade.get("/metrics"))[1]
        status, body, headers = await facade.post(CHAT, chat())
        check_envelope(status, body, 503)
        assert headers["Retry-After"]
        answer = await streaming
        assert answer.finish_reasons() == ["stop"] and len(answer.deltas()) == len(ids)
        status, body, _ = await whole
        assert status == 200 and text_of(body) == answer.text()
        assert await asyncio.wait_for(running.wait(), 30) == 0
        assert running.stdout is not None and await running.stdout.read() == b""


async def until_unready(facade: Harness) -> None:
    deadline = time.monotonic() + 10
    while (answer := await facade.get("/readyz"))[0] == 200:
        assert time.monotonic() < deadline, "still ready"
        await asyncio.sleep(0.02)
    check_envelope(answer[0], json.loads(answer[1]), 503)


@pytest.mark.parametrize("grace", ["0.5", "90"], ids=["grace over", "second signal"])
async def test_streams_that_outlast_the_grace_end_with_an_error(
    embedded_model_dir: Path, grace: str
) -> None:
    async with process_and_fake(embedded_model_dir, "--shutdown-timeout", grace) as (
        running,
        facade,
    ):
        facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
        streaming = asyncio.create_task(facade.stream(CHAT, chat()))
        whole = asyncio.create_task(facade.post(CHAT, chat()))
        calls = await facade.fake.wait_for_calls(2)
        await asyncio.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        if grace == "90":
            await until_unready(facade)
            running.send_signal(signal.SIGTERM)
        answer = await asyncio.wait_for(streaming, 30)
        assert answer.finish_reasons() == [] and answer.num_done == 1
        assert answer.events[-1]["error"]["code"] == "engine_unavailable"
        status, body, _ = await whole
        check_envelope(status, body, 503)
        assert await asyncio.wait_for(running.wait(), 30) == 0
        for call in calls:
            assert (await call.wait_closed()).value == "cancelled"


async def test_a_port_in_use_is_said_with_the_flag_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with process("--port", str(port)) as running:
            output, errors = await asyncio.wait_for(running.communicate(), 30)
    assert running.returncode == 2
    assert output == b""
    assert f"port {port}".encode() in errors and b"--port" in errors
    assert b"Traceback" not in errors


async def test_prompts_and_keys_are_never_logged(embedded_model_dir: Path) -> None:
    async with process_and_fake(
        embedded_model_dir, "--log-level", "debug", "--api-key", "very-secret"
    ) as (running, facade):
        facade.say("an answer to hide")
        key = {"authorization": "Bearer very-secret", "x-request-id": "log-1"}
        body = chat(messages=[{"role": "user", "content": "a prompt to hide"}])
        assert (await facade.post(CHAT, body, key))[0] == 200
        assert (await facade.post(CHAT + "?a=1%0Ab", body, {"x-api-key": "wrong"}))[0] == 401
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        log = (await running.stderr.read()).decode()
        assert await running.wait() == 0
    (line,) = [line for line in log.splitlines() if "id=log-1 " in line]
    for part in ("method=POST", f"path={CHAT}", "status=200", "prompt_tokens=", "finish=stop"):
        assert part in line
    assert "status=401" in log
    for secret in ("very-secret", "to hide"):
        assert secret not in log


# ---------------------------------------------------------------- around every route


async def test_every_route_but_the_probes_asks_for_the_key(embedded_model_dir: Path) -> None:
    edge = EdgeConfig(api_keys=plain_keys(["k1"]))
    async with facade_and_fake(embedded_model_dir, edge=edge) as facade:
        facade.say("fine")
        app_routes = {
            (route.method, route.resource.canonical)
            for route in facade_routes(facade)
            if route.resource is not None
        }
        assert len(app_routes) >= 9
        async with aiohttp.ClientSession() as session:
            for method, path in sorted({*app_routes, ("GET", "/no/such"), ("PUT", CHAT)}):
                url = facade.url + path.replace("{model}", MODEL)
                async with session.request(method, url) as answer:
                    if path in ("/healthz", "/readyz"):
                        assert answer.status == 200
                        continue
                    assert answer.status == 401, path
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    if method != "HEAD":
                        error = check_envelope(401, await answer.json(), 401)
                        assert error["code"] == "invalid_api_key"
        for good in ({"authorization": "Bearer k1"}, {"authorization": "bearer k1"},
                     {"x-api-key": "k1"}):  # fmt: skip
            assert (await facade.post(CHAT, chat(), good))[0] == 200
        for bad in ({"authorization": "Bearer k"}, {"authorization": "Basic k1"},
                    {"x-api-key": "k1 "  "x"}, {"authorization": "Bearer kлюч"}, {}):  # fmt: skip
            assert (await facade.post(CHAT, chat(), bad))[0] == 401


def facade_routes(facade: Harness) -> list[aiohttp.web.AbstractRoute]:
    from http_facade.app import create_app

    return list(create_app(facade.running.facade.config).router.routes())


async def test_strict_params_refuse_what_is_unknown(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, strict_params=True) as facade:
        for path in (CHAT, COMPLETIONS):
            status, body, _ = await facade.post(path, body_for(path, no_such=1))
            check_envelope(status, body, 400, "no_such")
            assert (await facade.post(path, body_for(path, no_such=None)))[0] == 200


async def test_metrics(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        ids = facade.say("one two three", delay_seconds=0.02)
        await facade.stream(CHAT, chat())
        await facade.post(COMPLETIONS, body_for(COMPLETIONS))
        await facade.post(CHAT, chat(model="made-up-by-a-caller"))
        await facade.get("/made/up/path")
        status, raw, headers = await facade.get("/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain")
        text = raw.decode()
        labels = f'gen_ai_operation_name="chat",gen_ai_request_model="{MODEL}"'
        ttft = f"gen_ai_server_time_to_first_token_seconds_sum{{{labels}}} "
        (line,) = [line for line in text.splitlines() if line.startswith(ttft)]
        assert 0.02 <= float(line.split()[-1]) < 1
        assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1.0" in text
        assert 'operation_name="text_completion"' in text
        assert 'http_route="unmatched"' in text and 'error_type="model_not_found"' in text
        assert "made" not in text
        assert 'http_server_active_requests{http_route="/v1/chat/completions"} 0.0' in text
        assert len(ids) > 1


# ---------------------------------------------------------------- traces


async def test_one_trace_from_the_caller_to_the_engine(embedded_model_dir: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with facade_and_fake(embedded_model_dir, tracer_provider=provider) as facade:
        facade.say("fine", cached_tokens=3)
        sent = {"traceparent": TRACEPARENT, "x-request-id": "traced"}
        await facade.stream(CHAT, chat(user="someone", temperature=0.5), sent)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        server, render, tokenize = (spans[n] for n in (f"POST {CHAT}", "render", "tokenize"))
        assert server.kind is SpanKind.SERVER
        assert server.parent is not None and f"{server.parent.span_id:016x}" == TRACEPARENT[36:52]
        for span in (server, render, tokenize):
            assert f"{span.context.trace_id:032x}" == TRACE_ID
        for child in (render, tokenize):
            assert child.parent is not None and child.parent.span_id == server.context.span_id
        attributes = dict(server.attributes or {})
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.request.temperature"] == 0.5
        assert attributes["gen_ai.usage.output_tokens"] == 2
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert attributes["firsttoken.request.id"] == "traced"
        assert attributes["http.response.status_code"] == 200
        assert "someone" not in attributes.values()
        assert [event.name for event in server.events] == ["prepared", "first_byte_written"]
        assert server.status.status_code is StatusCode.UNSET
        propagated = facade.fake.calls[0].metadata["traceparent"]
        assert propagated.split("-")[1] == TRACE_ID


async def test_concurrent_traces_never_mix_and_every_span_ends(embedded_model_dir: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with facade_and_fake(embedded_model_dir, tracer_provider=provider) as facade:
        facade.say("one two three", delay_seconds=0.02)
        headers = {f"t{i}": f"00-{i + 1:032x}-00f067aa0ba902b7-01" for i in range(8)}
        sent = [{"traceparent": value, "x-request-id": key} for key, value in headers.items()]
        sent += [{"traceparent": "malformed", "x-request-id": "bad"}, {"x-request-id": "none"}]
        sent += [{"traceparent": TRACEPARENT[:-2] + "00", "x-request-id": "unsampled"}]
        answers = await asyncio.gather(*(facade.stream(CHAT, chat(), one) for one in sent))
        assert {answer.text() for answer in answers} == {"one two three"}
        servers = {
            str((span.attributes or {})["firsttoken.request.id"]): span
            for span in exporter.get_finished_spans()
            if span.kind is SpanKind.SERVER
        }
        assert servers.keys() == {*headers, "bad", "none"}
        for call in facade.fake.calls:
            request_id = call.request.request_id.rsplit("-", 1)[0]
            if request_id == "unsampled":
                continue
            server = servers[request_id]
            trace_id = f"{server.context.trace_id:032x}"
            assert call.metadata["traceparent"].split("-")[1] == trace_id
            if request_id in headers:
                assert headers[request_id].split("-")[1] == trace_id
        assert servers["bad"].parent is servers["none"].parent is None

        exporter.clear()
        facade.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
        reader, writer = await facade.send_raw(CHAT, chat(stream=True))
        await reader.readuntil(b'"content":')
        writer.close()
        facade.fake.script(Script.failing(OutOfMemory("none left")))
        deadline = time.monotonic() + 10
        while not any(s.kind is SpanKind.SERVER for s in exporter.get_finished_spans()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await facade.post(CHAT, chat())
        await facade.post(CHAT, chat(n=0))
        ended = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
        outcomes = [
            ((s.attributes or {})["error.type"], s.status.status_code is StatusCode.ERROR)
            for s in ended
        ]
        assert outcomes == [
            ("client_gone", True),
            ("out_of_memory", True),
            ("invalid_value", False),
        ]
        assert all(s.end_time is not None and s.end_time >= (s.start_time or 0) for s in ended)


async def test_an_unexpected_failure_is_logged_and_enveloped(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:

        def broken(metrics: FacadeMetrics) -> bytes:
            raise ZeroDivisionError("a secret of the code")

        monkeypatch.setattr(FacadeMetrics, "exposition", broken)
        with caplog.at_level(logging.ERROR):
            status, raw, _ = await facade.get("/metrics")
            error = check_envelope(status, json.loads(raw), 500)
        assert "secret" not in error["message"]
        assert "a secret of the code" in caplog.text


async def test_content_after_a_long_prefill_is_timed_from_arrival(embedded_model_dir: Path) -> None:
    """Headers and the role come with the first progress; the first token is what TTFT counts."""
    async with facade_and_fake(embedded_model_dir) as facade:
        steps = (Accept(), Progress(), Pause(2.5), *Script.of_tokens([504]).steps[2:])
        facade.fake.script(Script(steps))
        began = time.monotonic()
        reader, writer = await facade.send_raw(CHAT, chat(stream=True))
        await reader.readuntil(b'"role":"assistant"')
        assert time.monotonic() - began < 2.3
        await reader.readuntil(b"[DONE]")
        writer.close()
        text = (await facade.get("/metrics"))[1].decode()
        name = "gen_ai_server_time_to_first_token_seconds_sum{"
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert float(line.split()[-1]) >= 2.5
