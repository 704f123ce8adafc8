"""What never reaches a route: bytes that are no request, codings and expectations not met here."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.facade_harness import CHAT, Harness, chat, check_envelope, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = json.dumps(chat()).encode()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        harness.say("fine")
        yield harness


async def exchange(
    facade: Harness, sent: bytes, *, then_closed: bool = False
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and document of the first answer to raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status_line, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (x.split(": ", 1) for x in lines)}
            document = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert not then_closed or await reader.read() == b""
    finally:
        writer.close()
    return int(status_line.split()[1]), headers, document


def post(*headers: str, path: str = CHAT, body: bytes = GOOD) -> bytes:
    length = f"Content-Length: {len(body)}"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", length]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"B@D / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", 400, "invalid_http"),
        (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
            400,
            "invalid_http",
        ),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
            400,
            "invalid_http",
        ),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nx-long: " + b"x" * 20_000 + b"\r\n\r\n",
            431,
            "headers_too_large",
        ),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "headers_too_large"),
    ],
    ids=["method", "tls", "version", "header", "length", "lengths", "long header", "long path"],
)
async def test_what_is_no_request_is_refused_in_the_envelope(
    facade: Harness, sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = await exchange(facade, sent, then_closed=True)
    check_refusal(*answer, status, code)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "http_facade.access"]
    assert line == f"id={answer[1]['x-request-id']} status={status} error={code}"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def check_refusal(
    status: int, headers: dict[str, str], document: dict[str, Any], expected: int, code: str
) -> None:
    error = check_envelope(status, document, expected)
    assert error["code"] == code and "\n" not in error["message"]
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"] and headers["server"] == "firsttoken"


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "snappy", "compress", "gzip, gzip", "gzip, identity", "é"]
)
async def test_codings_other_than_gzip_and_deflate_are_415(facade: Harness, encoding: str) -> None:
    answer = await exchange(facade, post(f"Content-Encoding: {encoding}"))
    check_refusal(*answer, 415, "unsupported_media_type")


async def test_codings_that_are_taken(facade: Harness) -> None:
    assert (await exchange(facade, post("Content-Encoding: Identity")))[0] == 200
    packed = post("Content-Encoding: deflate", body=zlib.compress(GOOD))
    assert (await exchange(facade, packed))[0] == 200


async def test_a_body_that_does_not_decode_is_no_fault_of_ours(
    facade: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    torn = zlib.compress(GOOD)[:-4] + b"torn"
    answer = await exchange(facade, post("Content-Encoding: deflate", body=torn), then_closed=True)
    check_refusal(*answer, 400, "bad_encoding")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/no/such", "/healthz"])
async def test_an_expectation_that_cannot_be_met_is_417(facade: Harness, path: str) -> None:
    answer = await exchange(facade, post("Expect: banana", path=path))
    check_refusal(*answer, 417, "expectation_failed")
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    writer.write(post("Expect: 100-continue"))
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    writer.close()


async def test_a_fault_outside_of_every_route_is_enveloped_and_logged(
    facade: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret of the code")

    monkeypatch.setattr("http_facade.middleware.new_state", broken)
    answer = await exchange(facade, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    check_refusal(*answer, 500, "internal_error")
    assert "secret" in caplog.text and "secret" not in str(answer)
