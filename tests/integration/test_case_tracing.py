"""CASE O5: one trace from client to engine, also for aborts and errors."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from clients import EngineUnavailable, rpc_span
from clients.testing import Script
from tests.facade_harness import COMPLETIONS, completion, facade_and_fake
from tests.serving import Served, stream, wait_idle
from tests.stored_requests import read_request
from traces import names
from traces.explain.explanation import explain
from traces.file_store import FileSpanExporter
from traces.request_reader import read_since
from traces.request_view import RequestView

LONG = [1000 + number for number in range(7_900)]  # its prefill takes many seconds


@dataclass
class Sent:
    """One stream of the case."""

    prompt: object = "Once upon a time"
    traceparent: str | None = None
    fields: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    leave_after_seconds: float | None = None
    leave_at_first_token: bool = False
    request_id: str = field(default_factory=lambda: f"o5-{secrets.token_hex(8)}")

    @property
    def trace_id(self) -> str:
        return (self.traceparent or "").split("-")[1]

    @property
    def parent(self) -> str:
        return (self.traceparent or "").split("-")[2]


def traceparent(flags: str = "01") -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}"


async def send(served: Served, sent: Sent) -> int:
    """The status; 0: the client left."""
    headers = {**sent.headers, "x-request-id": sent.request_id}
    if sent.traceparent is not None:
        headers["traceparent"] = sent.traceparent
    body = {
        "model": served.model,
        "prompt": sent.prompt,
        "max_tokens": 12,
        "ignore_eos": True,
        **sent.fields,
    }
    try:
        if sent.leave_at_first_token:
            await first_token(served, body, headers)
            return 0
        async with asyncio.timeout(sent.leave_after_seconds):
            return (await stream(served.http, "/v1/completions", body, headers)).status
    except TimeoutError:
        return 0
    except aiohttp.ClientError:
        return 0


async def first_token(served: Served, body: dict[str, object], headers: dict[str, str]) -> None:
    """Reads so far, then drops the connection."""
    url = served.http + "/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={**body, "stream": True}, headers=headers) as answer,
    ):
        await answer.content.readuntil(b'"text"')


@dataclass(frozen=True)
class Case:
    sent: dict[str, Sent]
    statuses: dict[str, int]
    views: dict[str, RequestView]  # by request id

    def view(self, name: str) -> RequestView:
        return self.views[self.sent[name].request_id]


@pytest.fixture(scope="module")
def case(served: Served) -> Case:
    """Eight streams at once."""
    sent = {
        "first": Sent(traceparent=traceparent()),
        "two samples": Sent(traceparent=traceparent(), fields={"n": 2}),
        "unsampled": Sent(traceparent=traceparent("00")),
        "malformed": Sent(traceparent="00-not-a-trace"),
        "absent": Sent(),
        "left in decode": Sent(
            traceparent=traceparent(), fields={"max_tokens": 4_000}, leave_at_first_token=True
        ),
        "left in prefill": Sent(LONG, traceparent(), leave_after_seconds=2.0),
        "failed": Sent(
            traceparent=traceparent(),
            fields={"max_tokens": 4_000},
            headers={"x-request-timeout": "4"},
        ),
    }

    async def run() -> Case:
        statuses = await asyncio.gather(*(send(served, one) for one in sent.values()))
        await wait_idle(served, 40)
        wanted = {one.request_id for name, one in sent.items() if name != "unsampled"}
        deadline = time.monotonic() + 30
        while True:
            views = _by_request_id(read_since(served.trace_dir, 0))
            if wanted <= views.keys() and all(views[one].call is not None for one in wanted):
                return Case(sent, dict(zip(sent, statuses, strict=True)), views)
            assert time.monotonic() < deadline, wanted - views.keys()
            await asyncio.sleep(0.2)

    return asyncio.run(run())


def _by_request_id(views: list[RequestView]) -> dict[str, RequestView]:
    found = {}
    for view in views:
        if view.facade is not None:
            found[str(view.facade["attributes"][names.REQUEST_ID])] = view
    return found


def test_one_trace_id_a_request_never_mixed(case: Case) -> None:
    roots = set()
    for name, sent in case.sent.items():
        if name == "unsampled":
            continue
        view = case.view(name)
        roots.add(view.trace_id)
        call = view.call
        assert view.facade is not None and call is not None and call.client is not None
        assert call.client["parent_span_id"] == view.facade["span_id"]
        assert call.server["parent_span_id"] == call.client["span_id"]
        assert call.request_id.startswith(sent.request_id)
        ids = {span["span_id"] for span in view.spans}
        for span in view.spans:
            assert span["parent_span_id"] in ids or span is view.facade
            assert span["end_unix_ns"] >= span["start_unix_ns"]
            carried = span["attributes"].get(names.REQUEST_ID, sent.request_id)
            assert str(carried).startswith(sent.request_id)
    assert len(roots) == 7


@pytest.mark.parametrize(
    "name", ["first", "two samples", "left in decode", "left in prefill", "failed"]
)
def test_the_callers_span_is_the_parent(case: Case, name: str) -> None:
    view, sent = case.view(name), case.sent[name]
    assert view.facade is not None
    assert (view.trace_id, view.facade["parent_span_id"]) == (sent.trace_id, sent.parent)


@pytest.mark.parametrize("name", ["malformed", "absent"])
def test_without_a_context_a_new_root_is_started(case: Case, name: str) -> None:
    assert case.statuses[name] == 200
    facade = case.view(name).facade
    assert facade is not None and facade["parent_span_id"] == ""


def test_what_is_not_sampled_exports_nothing(case: Case, served: Served) -> None:
    assert case.statuses["unsampled"] == 200
    assert read_request(served.trace_dir, case.sent["unsampled"].trace_id) is None
    assert case.sent["unsampled"].request_id not in case.views


def test_what_was_left_is_ended_with_a_status(case: Case) -> None:
    for name in ("left in decode", "left in prefill"):
        view = case.view(name)
        assert case.statuses[name] == 0
        assert view.facade is not None and view.call is not None
        assert view.facade["status"]["code"] == "ERROR"
        server = view.call.server
        assert server["status"] == {"code": "ERROR", "message": "CANCELLED"}, (name, server)
        last = max(view.call.stages.values(), key=lambda span: span["end_unix_ns"])
        assert last["status"]["code"] == "ERROR"
    decode = case.view("left in decode").call
    assert decode is not None and names.SPAN_DECODE in decode.stages
    prefill = case.view("left in prefill")
    assert prefill.call is not None and names.SPAN_DECODE not in prefill.call.stages
    said = explain(prefill)
    assert said.ttft_seconds is None and said.attributed_share > 0.9


def test_what_failed_says_why(case: Case) -> None:
    view = case.view("failed")
    assert view.facade is not None and view.call is not None
    assert view.facade["status"]["code"] == "ERROR"
    assert view.call.server["status"]["message"] == "DEADLINE_EXCEEDED"


def test_samples_have_their_own_stages(case: Case) -> None:
    spans = case.view("two samples").spans
    for name in (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DELIVER, names.SPAN_DECODE):
        of_name = [span for span in spans if span["name"] == name]
        assert sorted(str(s["attributes"][names.SAMPLE_INDEX]) for s in of_name) == ["0", "1"]


@pytest.mark.parametrize("name", ["first", "two samples", "absent", "left in decode"])
def test_all_of_the_time_is_attributed(case: Case, name: str) -> None:
    said = explain(case.view(name))
    assert said.ttft_seconds is not None
    assert said.attributed_share >= 0.98, said.parts


async def test_attempts_before_accepted_are_of_one_trace(
    embedded_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(tmp_path, "facade")))
    monkeypatch.setattr(rpc_span, "_tracer", provider.get_tracer("firsttoken.clients"))
    async with facade_and_fake(embedded_model_dir, tracer_provider=provider) as facade:
        token_ids = facade.tok.encode("A word", add_special_tokens=False)
        refused = Script.failing(EngineUnavailable("down"))
        facade.fake.script(refused, Script.of_tokens(token_ids, stop_token_id=2))
        sent = Sent(traceparent=traceparent())
        answer = await facade.stream(
            COMPLETIONS, completion(), {"traceparent": sent.traceparent or ""}
        )
        assert answer.status == 200
        metadata = [call.metadata["traceparent"].split("-") for call in facade.fake.calls]
    provider.shutdown()
    view = read_request(tmp_path, sent.trace_id)
    assert view is not None and view.facade is not None
    attempts = [span for span in view.spans if span["kind"] == "CLIENT"]
    assert [span["status"]["code"] for span in attempts] == ["ERROR", "UNSET"]
    assert [span["parent_span_id"] for span in attempts] == [view.facade["span_id"]] * 2
    assert [carried[1:3] for carried in metadata] == [
        [sent.trace_id, span["span_id"]] for span in attempts
    ]
