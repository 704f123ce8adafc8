"""/traces: what it lists and tells of the store, who may see it, and that reading stops nobody."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openapi_spec_validator import OpenAPIV31SpecValidator

from access.keys import admin_key, digest_of, plain_keys
from clients import rpc_span
from clients.errors import QueueFull
from clients.testing import Fail, Script
from http_facade import trace_reader
from http_facade.app import create_app
from http_facade.edge import EdgeConfig
from http_facade.flags import FacadeConfig, build_parser, config_from_args
from http_facade.openapi import openapi_document
from http_facade.openapi_routes import OPERATIONS, TRACE_OPERATIONS
from tests.facade_harness import CHAT, MODEL, Harness, chat, check_envelope, facade_and_fake
from tests.trace_samples import request
from traces.file_store import FileSpanExporter
from traces.provider import FirstTokenProvider

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAST, SLOW, REFUSED = ("1" * 32, "2" * 32, "3" * 32)


def traced(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{'a' * 16}-01"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path, store: Path) -> AsyncIterator[Harness]:
    """After three requests: a fast one, a slow one, and one that was refused."""
    provider = FirstTokenProvider(
        "firsttoken-facade",
        [FileSpanExporter(store, "firsttoken-facade")],
        sample_ratio=1.0,
        holds=False,
        trusts_callers=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_span, "_tracer", provider.get_tracer("firsttoken.clients"))
        async with facade_and_fake(
            embedded_model_dir,
            tracer_provider=provider,
            trace_dir=str(store),
            enable_traces_page=True,
        ) as harness:
            harness.say("Well then")
            await harness.stream(CHAT, chat(), traced(FAST))
            harness.say("Well then", delay_seconds=0.5)
            await harness.stream(CHAT, chat(), traced(SLOW))
            harness.fake.script(Script((Fail(QueueFull("full")),)))
            assert (await harness.post(CHAT, chat(), traced(REFUSED)))[0] == 429
            await asyncio.to_thread(provider.force_flush)
            yield harness
    provider.shutdown()


async def ask(
    facade: Harness, path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, Any, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(facade.url + path, headers=headers) as answer,
    ):
        raw = await answer.read()
        is_json = answer.content_type == "application/json"
        return answer.status, json.loads(raw) if is_json else raw.decode(), answer.headers


async def listed(facade: Harness, query: str = "") -> list[str]:
    """Trace ids."""
    status, body, _ = await ask(facade, f"/traces/data/requests?{query}")
    assert status == 200, body
    return [row["trace_id"] for row in body["requests"]]


async def test_the_newest_request_is_listed_first(facade: Harness) -> None:
    status, body, headers = await ask(facade, "/traces/data/requests")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert (body["num_read"], body["is_all"]) == (3, True)
    assert [row["trace_id"] for row in body["requests"]] == [REFUSED, SLOW, FAST]
    refused, slow, fast = body["requests"]
    assert (fast["name"], fast["model"], fast["is_error"]) == (f"POST {CHAT}", MODEL, False)
    assert fast["ttft_ms"] < 500 <= slow["ttft_ms"] <= slow["total_ms"]
    assert (refused["ttft_ms"], refused["is_error"], refused["status"]) == (None, True, "429")
    assert fast["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("min_ttft_ms=400", [SLOW]),
        ("errors=1", [REFUSED]),
        ("limit=2", [REFUSED, SLOW]),
        (f"text={FAST[:8]}", [FAST]),
        ("text=CHAT/completions", [REFUSED, SLOW, FAST]),
        ("text=429&errors=0", [REFUSED]),
        ("text=nothing-like-it", []),
        ("text=&min_ttft_ms=&limit=", [REFUSED, SLOW, FAST]),
    ],
)
async def test_filters(facade: Harness, query: str, expected: list[str]) -> None:
    assert await listed(facade, query) == expected


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("min_ttft_ms=soon", "min_ttft_ms"),
        ("min_ttft_ms=-1", "min_ttft_ms"),
        ("min_ttft_ms=nan", "min_ttft_ms"),
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("errors=yes", "errors"),
        (f"text={'x' * 201}", "text"),
    ],
)
async def test_wrong_filters_are_refused(facade: Harness, query: str, param: str) -> None:
    status, body, _ = await ask(facade, f"/traces/data/requests?{query}")
    check_envelope(status, body, 400, param)


async def test_one_request_is_explained(facade: Harness) -> None:
    status, body, _ = await ask(facade, f"/traces/data/requests/{SLOW}")
    assert status == 200
    assert body["request"]["trace_id"] == SLOW
    explanation = body["explanation"]
    assert explanation["ttft_seconds"] * 1000 == pytest.approx(body["request"]["ttft_ms"])
    names = [row["name"] for row in body["rows"]]
    assert names[0] == "read_body" and {"render", "tokenize"} <= set(names)
    starts = [row["start_ms"] for row in body["rows"]]
    assert starts == sorted(starts)
    assert all(row["end_ms"] <= explanation["ttft_seconds"] * 1000 + 1 for row in body["rows"])
    assert {span["name"] for span in body["spans"]} >= {f"POST {CHAT}", "tokenize"}
    assert body["spans_left_out"] == 0


async def test_one_that_failed_is_told_to_its_end(facade: Harness) -> None:
    status, body, _ = await ask(facade, f"/traces/data/requests/{REFUSED}")
    assert status == 200
    assert body["explanation"]["ttft_seconds"] is None
    assert body["request"]["is_error"]


async def test_each_turn_of_a_trace_is_a_request_of_its_own(facade: Harness, store: Path) -> None:
    trace_id = "4" * 32
    turns = [*request(trace_id), *request(trace_id, at_ms=500, waits_ms=600)]
    foreign = '{"name": "of somebody else"}\n'
    path = store / "turns-1.jsonl"
    path.write_text(foreign + "".join(json.dumps(span) + "\n" for span in turns))
    try:
        _, body, _ = await ask(facade, f"/traces/data/requests?text={trace_id}")
        later, earlier = body["requests"]
        for row in (later, earlier):
            url = f"/traces/data/requests/{trace_id}?span={row['span_id']}"
            status, found, _ = await ask(facade, url)
            assert (status, found["request"]) == (200, row)
            assert found["turns"] == [earlier, later]
        _, first, _ = await ask(facade, f"/traces/data/requests/{trace_id}")
        assert first["request"] == earlier
        assert (await ask(facade, f"/traces/data/requests/{trace_id}?span={'0' * 16}"))[0] == 404
        status, body, _ = await ask(facade, f"/traces/data/requests/{trace_id}?span=1")
        check_envelope(status, body, 400, "span")
    finally:
        path.unlink()


@pytest.mark.parametrize("trace_id", ["f" * 32, "F" * 32, "abc", "..%2f..%2fetc"])
async def test_what_the_store_does_not_have_is_not_found(facade: Harness, trace_id: str) -> None:
    status, body, _ = await ask(facade, f"/traces/data/requests/{trace_id}")
    assert check_envelope(status, body, 404)["code"] == "trace_not_found"


async def test_the_pages(facade: Harness) -> None:
    for path in ("/traces", f"/traces/{SLOW}"):
        status, text, headers = await ask(facade, path)
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for name in ("style.css", "traces.css", "traces.js"):
            assert f"/assets/{name}" in text
            assert (await ask(facade, f"/assets/{name}"))[0] == 200
    assert (await ask(facade, "/traces/none"))[0] == 404
    _, chat_page, _ = await ask(facade, "/")
    assert '<meta name="trace-page" content="yes">' in chat_page


def newest_lines(store: Path) -> list[bytes]:
    (newest,) = store.glob("firsttoken-facade-*.jsonl")
    return newest.read_bytes().splitlines(keepends=True)


async def test_only_the_newest_part_of_a_large_store_is_read(
    facade: Harness, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = store / "older-1.jsonl"
    older.write_bytes(b'{"torn\n' * 10)
    os.utime(older, (1, 1))
    try:
        lines = newest_lines(store)
        monkeypatch.setattr(trace_reader, "LIST_BYTES", sum(map(len, lines)))
        _, body, _ = await ask(facade, "/traces/data/requests")
        assert (body["num_read"], body["is_all"]) == (3, False)
        of_refused = sum(len(line) for line in lines if REFUSED.encode() in line)
        monkeypatch.setattr(trace_reader, "LIST_BYTES", of_refused + 5)
        _, body, _ = await ask(facade, "/traces/data/requests")
        assert (body["num_read"], body["is_all"]) == (1, False)
        assert body["requests"][0]["trace_id"] == REFUSED
    finally:
        older.unlink()


@pytest.mark.parametrize("is_newer", ["engine", "facade"])
async def test_a_list_has_whole_requests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: str
) -> None:
    """Whichever of two large files was written last, and however much one of them has to say."""
    files = {name: (tmp_path / f"{name}-1.jsonl").open("w") for name in ("engine", "facade")}
    with files["engine"], files["facade"]:
        for number in range(200):
            spans = request(f"{number:032x}", at_ms=1_000 * number)
            facades = {spans[0]["span_id"]}
            for span in sorted(spans, key=lambda span: span["end_unix_ns"]):
                is_facades = {span["span_id"], span["parent_span_id"]} & facades
                files["facade" if is_facades else "engine"].write(json.dumps(span) + "\n")
    os.utime(tmp_path / f"{is_newer}-1.jsonl", (2**31, 2**31))
    monkeypatch.setattr(trace_reader, "LIST_BYTES", 200_000)
    monkeypatch.setattr(trace_reader, "_CHUNK_BYTES", 4_096)
    reader = trace_reader.TraceReader(tmp_path)
    found: Any = await reader.requests(trace_reader.TraceFilter(limit=500))
    reader.close()
    rows = found["requests"]
    assert 20 < len(rows) < 200 and not found["is_all"]
    assert {(row["name"], row["cause"]) for row in rows} == {("POST /v1/completions", "no_blocks")}
    assert [row["trace_id"] for row in rows] == [f"{199 - n:032x}" for n in range(len(rows))]


async def test_reading_stops_nobody(facade: Harness, store: Path) -> None:
    """A store that does not come back: a pipe into which nobody writes."""
    pipe = store / "pipe-1.jsonl"
    os.mkfifo(pipe)
    try:
        reading = asyncio.create_task(ask(facade, "/traces/data/requests"))
        await asyncio.sleep(0.2)
        facade.say("Still here")
        streamed = await facade.stream(CHAT, chat())
        assert streamed.text() == "Still here"
        assert not reading.done()
        with pipe.open("wb"):
            pass
        status, body, _ = await reading
        assert status == 200 and len(body["requests"]) >= 3
    finally:
        pipe.unlink()


# ---------------------------------------------------------------- who may, and whether at all


async def test_only_an_admin_key_opens_them(embedded_model_dir: Path, store: Path) -> None:
    edge = EdgeConfig(api_keys=plain_keys(["user"]), admin_key=admin_key(digest_of("operator")))
    async with facade_and_fake(
        embedded_model_dir, trace_dir=str(store), enable_traces_page=True, edge=edge
    ) as facade:
        for path in ("/traces", f"/traces/{FAST}", "/traces/data/requests"):
            assert (await ask(facade, path))[0] == 401
            for key, expected in (("user", 403), ("operator", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await ask(facade, path, headers))[0] == expected, (path, key)


async def test_they_are_not_there_unless_enabled(embedded_model_dir: Path, store: Path) -> None:
    async with facade_and_fake(embedded_model_dir, trace_dir=str(store)) as facade:
        for path in ("/traces", f"/traces/{FAST}", "/traces/data/requests"):
            assert (await ask(facade, path))[0] == 404
        assert "/traces" not in (await ask(facade, "/openapi.json"))[1]["paths"]


async def test_the_page_needs_a_store() -> None:
    with pytest.raises(ValueError, match="--trace-dir"):
        config_from_args(build_parser().parse_args(["--enable-traces-page", "--trace-dir=none"]))


async def test_their_routes_are_described_where_they_are(store: Path) -> None:
    app = create_app(FacadeConfig(enable_traces_page=True, trace_dir=str(store)))
    routed = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method == "GET"
    }
    described = {(one.method, one.path) for one in OPERATIONS + TRACE_OPERATIONS}
    assert routed == {(method, path) for method, path in described if method == "GET"}
    document = json.loads(json.dumps(openapi_document("m", shows_traces=True)))
    OpenAPIV31SpecValidator(document).validate()
