"""Connections that keep still: how long they may, and who is not to be cut off by that."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.facade_harness import CHAT, Harness, chat, facade_and_fake

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE = 0.3  # seconds
ENOUGH = 2.0  # seconds: for who is not to be cut off, on a busy machine, too


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient_for(PATIENCE, monkeypatch)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient_for(ENOUGH, monkeypatch)


def be_patient_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_SECONDS", "_UNREAD_SECONDS"):
        monkeypatch.setattr(f"http_facade.patience.{name}", seconds)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(facade: Harness, rcvbuf: int | None = None) -> AsyncIterator[Streams]:
    """`rcvbuf`: so little is buffered on the client's side."""
    client = socket.socket()
    client.setblocking(False)
    if rcvbuf is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", facade.running.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=2**16)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Status line and body."""
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
        return head.split(b"\r\n")[0], await reader.readexactly(int(lines[b"Content-Length"]))


async def is_closed(reader: asyncio.StreamReader, within_seconds: float) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), within_seconds) == b""
    except TimeoutError:
        return False


@pytest.mark.usefixtures("impatient")
async def test_whoever_sends_no_whole_head_is_left(embedded_model_dir: Path) -> None:
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade) as (silent, _),
        connected(facade) as (half, writer),
        connected(facade) as (dripping, drips),
    ):
        writer.write(HEAD[:9])
        drip = asyncio.create_task(send_slowly(drips, HEAD, 0.1))
        assert await is_closed(silent, 10)
        assert await is_closed(half, 10)
        assert await is_closed(dripping, 10)
        drip.cancel()


async def send_slowly(writer: asyncio.StreamWriter, data: bytes, pause_seconds: float) -> None:
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(pause_seconds)


@pytest.mark.usefixtures("patient")
async def test_a_connection_may_rest_between_requests(embedded_model_dir: Path) -> None:
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(HEAD[:20])
            await asyncio.sleep(0.1)
            writer.write(HEAD[20:])
            assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
            await asyncio.sleep(1.2 * ENOUGH)
        writer.write(HEAD[:20])
        assert await is_closed(reader, 10)


async def test_and_is_closed_after_a_long_rest(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_facade.patience._IDLE_SECONDS", PATIENCE)
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade) as (reader, writer),
    ):
        writer.write(HEAD)
        await answer(reader)
        assert await is_closed(reader, 10)


@pytest.mark.usefixtures("impatient")
async def test_slow_bodies_and_slow_engines_are_waited_for(embedded_model_dir: Path) -> None:
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade) as (reader, writer),
    ):
        facade.say("fine", delay_seconds=2 * PATIENCE)
        writer.write(head.encode() + body[:10])
        await asyncio.sleep(2 * PATIENCE)
        writer.write(body[10:])
        status, document = await answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert json.loads(document)["choices"][0]["message"]["content"] == "fine"


# Many times what the system's buffers take.
NUM_PAGES = 400
PAGES = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * NUM_PAGES


async def num_bytes_left(reader: asyncio.StreamReader) -> int:
    """Until the connection ends, however it does."""
    num_bytes = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(30):
            while piece := await reader.read(2**20):
                num_bytes += len(piece)
    return num_bytes


@pytest.mark.usefixtures("impatient")
async def test_whoever_takes_nothing_of_an_answer_is_left(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade, rcvbuf=4096) as (reader, writer),
    ):
        _, page, _ = await facade.get("/openapi.json")
        writer.write(PAGES)
        await asyncio.sleep(4 * PATIENCE)
        assert await num_bytes_left(reader) < NUM_PAGES * len(page)
    assert "a client took nothing" in caplog.text


@pytest.mark.usefixtures("patient")
async def test_whoever_takes_a_little_now_and_then_is_not(
    embedded_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Less than what makes the system ask for more."""
    async with (
        facade_and_fake(embedded_model_dir) as facade,
        connected(facade, rcvbuf=4096) as (reader, writer),
    ):
        writer.write(PAGES)
        for _ in range(7):
            await asyncio.sleep(ENOUGH / 4)
            assert await reader.read(2**20)
    assert "a client took nothing" not in caplog.text
