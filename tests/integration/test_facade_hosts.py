"""No page in a browser of this machine uses a server without keys through a name of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from access.keys import plain_keys
from http_facade.edge import EdgeConfig
from http_facade.openapi_routes import OPERATIONS
from tests.facade_harness import CHAT, MODEL, Harness, chat, check_envelope, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVIL = "evil.example"
OURS = ("localhost", "LocalHost:9000", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000")
FOREIGN = (EVIL, f"{EVIL}:8000", "localhost.evil.example", "evil-localhost", "127.0.0.1.example")
MALFORMED = (":8000", "", "me@localhost", "[::1]evil", "localhost:80:80", "[::1", "x" * 4_000)
PAGES = {operation.path for operation in OPERATIONS if operation.method == "GET"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    """As it is out of the box."""
    async with facade_and_fake(embedded_model_dir) as harness:
        harness.say("fine")
        yield harness


async def ask(
    facade: Harness, method: str, path: str, headers: Mapping[str, str], body: object = None
) -> tuple[int, dict[str, Any]]:
    """`Host` is sent as it is given."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, facade.url + path, headers=headers, json=body) as answer,
    ):
        raw = await answer.read()
        return answer.status, json.loads(raw) if raw.startswith(b"{") else {}


async def status_of(facade: Harness, request: str) -> int:
    """Of the answer to bytes as they are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    writer.write(request.encode())
    status_line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return int(status_line.split()[1])


@pytest.mark.parametrize("host", [*OURS, "[::1]", "chat.localhost:8000"])
async def test_loopback_by_any_of_its_names(facade: Harness, host: str) -> None:
    assert (await ask(facade, "GET", "/v1/models", {"host": host}))[0] == 200
    assert (await ask(facade, "POST", CHAT, {"host": host}, chat()))[0] == 200


@pytest.mark.parametrize("host", [*FOREIGN, "203.0.113.9:8000", "0.0.0.0:8000", "[2001:db8::1]"])
async def test_a_name_that_only_leads_here_is_refused(facade: Harness, host: str) -> None:
    facade.fake.calls.clear()
    status, body = await ask(facade, "POST", CHAT, {"host": host}, chat())
    error = check_envelope(status, body, 403, "Host")
    assert error["code"] == "host_not_allowed" and host in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert not facade.fake.calls


@pytest.mark.parametrize("host", MALFORMED)
async def test_what_is_no_name_is_refused(facade: Harness, host: str) -> None:
    assert await status_of(facade, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n") == 403


@pytest.mark.parametrize("path", sorted(PAGES))
async def test_pages_and_metrics_too_but_for_the_probes(facade: Harness, path: str) -> None:
    path = path.replace("{model}", MODEL).replace("{name}", "style.css")
    assert (await ask(facade, "GET", path, {"host": "localhost"}))[0] == 200
    status, _ = await ask(facade, "GET", path, {"host": EVIL})
    assert status == (200 if path in ("/healthz", "/readyz") else 403)


async def test_the_traces_page_too(embedded_model_dir: Path, tmp_path: Path) -> None:
    async with facade_and_fake(
        embedded_model_dir, enable_traces_page=True, trace_dir=str(tmp_path)
    ) as traced:
        for path in ("/traces", "/traces/api/requests", "/nowhere"):
            assert (await ask(traced, "GET", path, {"host": EVIL}))[0] == 403
        assert (await ask(traced, "GET", "/traces", {"host": "localhost"}))[0] == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics HTTP/1.0\r\n", 200),  # no browser leaves the name out
        (f"GET /metrics HTTP/1.0\r\nHost: {EVIL}\r\n", 403),
        ("GET /metrics HTTP/1.1\r\n", 400),
        (f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: {EVIL}\r\n", 400),
        ("GET http://localhost:1/metrics HTTP/1.1\r\nHost: localhost:1\r\n", 200),
        ("GET http://[::1]:1/metrics HTTP/1.1\r\nHost: [::1]:1\r\n", 200),
        # the target's name counts (RFC 9112, 3.2.2)
        (f"GET http://{EVIL}/metrics HTTP/1.1\r\nHost: localhost\r\n", 403),
        (f"GET //{EVIL}/metrics HTTP/1.1\r\nHost: localhost\r\n", 404),
    ],
)
async def test_the_ways_to_say_a_name(facade: Harness, request_line: str, status: int) -> None:
    assert await status_of(facade, request_line + "\r\n") == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{EVIL}", 403),
        (f"http://{EVIL}:8000", 403),
        ("null", 403),
        ("", 403),
        ("chrome-extension://abcdefgh", 403),
        ("http://localhost:8000", 200),
        ("http://127.0.0.1:3000", 200),
        ("http://[::1]:8000", 200),
        ("tauri://localhost", 200),
    ],
)
async def test_pages_of_other_sites_change_nothing(
    facade: Harness, origin: str, status: int
) -> None:
    sent = {"host": "localhost:8000", "origin": origin}
    got, body = await ask(facade, "POST", CHAT, sent, chat())
    assert got == status
    if status == 403:
        error = check_envelope(got, body, 403, "Origin")
        assert error["code"] == "origin_not_allowed" and "--allowed-origins" in error["message"]
    assert (await ask(facade, "GET", "/v1/models", sent))[0] == 200  # which no such page can read


async def test_pages_that_were_named_may(embedded_model_dir: Path) -> None:
    edge = EdgeConfig(allowed_origins=("https://app.example",))
    async with facade_and_fake(embedded_model_dir, edge=edge) as facade:
        facade.say("fine")
        for origin, status in (("https://app.example", 200), ("https://app.example.evil", 403)):
            sent = {"host": "localhost", "origin": origin}
            assert (await ask(facade, "POST", CHAT, sent, chat()))[0] == status
        sent = {"host": "app.example", "origin": "https://app.example"}
        assert (await ask(facade, "POST", CHAT, sent, chat()))[0] == 403


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"edge": EdgeConfig(allowed_hosts=("*",))}, {EVIL: 200}),
        (
            {"edge": EdgeConfig(allowed_hosts=("LLM.example", "*.lan", "2001:db8::1"))},
            {
                "llm.example:443": 200,
                "a.b.lan": 200,
                "[2001:db8::1]:80": 200,
                "localhost": 200,
                "lan": 403,
                "evillan": 403,
                "x.llm.example": 403,
            },
        ),
        # whoever comes from elsewhere may call the server as they like, unless names are given
        ({"host": "0.0.0.0"}, {EVIL: 200}),
        ({"host": "0.0.0.0", "edge": EdgeConfig(allowed_hosts=("llm.example",))}, {EVIL: 403}),
        # a page has no key
        ({"edge": EdgeConfig(api_keys=plain_keys(["k"]))}, {EVIL: 200}),
        (
            {"edge": EdgeConfig(api_keys=plain_keys(["k"]), allowed_hosts=("llm.example",))},
            {EVIL: 403, "llm.example": 200},
        ),
    ],
)
async def test_what_may_be_set(
    embedded_model_dir: Path, config: dict[str, Any], expected: dict[str, int]
) -> None:
    async with facade_and_fake(embedded_model_dir, **config) as facade:
        for host, status in expected.items():
            sent = {"host": host, "authorization": "Bearer k"}
            assert (await ask(facade, "GET", "/v1/models", sent))[0] == status, host
