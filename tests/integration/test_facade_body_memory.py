"""Request bodies have so much memory together, whoever sends them, and however slowly."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from clients.testing import Accept, Emit, Finish, Hang, Progress, Script
from tests.facade_harness import CHAT, Harness, chat, check_envelope, facade_and_fake, until

KIB = 2**10
SMALL = 64 * KIB  # of each body: not counted
LARGE = 400 * KIB
LIMITS: dict[str, Any] = {
    "max_body_bytes": 512 * KIB,
    "max_total_body_bytes": 2 * (LARGE - SMALL) + 10 * KIB,
}


class Sender:
    """A request whose head is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, str, dict[str, object]]:
        """Status, head, document."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", head)
            assert length is not None, head
            document = await self.reader.readexactly(int(length[1]))
        return int(head.split()[1]), head, json.loads(document)

    async def status(self) -> int:
        return (await self.answer())[0]

    async def check_refused(self) -> None:
        status, head, document = await self.answer()
        assert check_envelope(status, document, 503)["code"] == "server_overloaded"
        assert "Retry-After: 1" in head and "x-should-retry: true" in head


@asynccontextmanager
async def sending(facade: Harness, *headers: str) -> AsyncIterator[Sender]:
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    lines = (f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    writer.write("\r\n".join((*lines, *headers, "", "")).encode())
    try:
        yield Sender(reader, writer)
    finally:
        writer.close()


def padded(num_bytes: int = LARGE) -> bytes:
    body = json.dumps(chat()).encode()
    return body[:-1] + b" " * (num_bytes - len(body)) + b"}"


def length(num_bytes: int = LARGE) -> str:
    return f"Content-Length: {num_bytes}"


async def held_bytes(facade: Harness) -> int:
    _, text, _ = await facade.get("/metrics")
    shown = re.search(rb"^firsttoken_request_body_bytes (\S+)", text, re.M)
    assert shown is not None
    return int(float(shown[1]))


async def until_held(facade: Harness, num_bytes: int) -> None:
    deadline = time.monotonic() + 60
    while await held_bytes(facade) != num_bytes:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_beyond_it_a_body_is_refused_before_it_is_read(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, **LIMITS) as facade:
        facade.say("fine")
        async with sending(facade, length()) as one, sending(facade, length()) as two:
            await until_held(facade, 2 * (LARGE - SMALL))  # before anything of them has come
            async with sending(facade, length()) as third:
                await third.check_refused()
                third.writer.write(padded() + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await third.answer())[2] == {"status": "ok"}  # its body was passed over
            for num_bytes in (1_000, SMALL):
                async with sending(facade, length(num_bytes)) as small:
                    small.writer.write(padded(num_bytes))
                    assert await small.status() == 200
            one.writer.write(padded())
            assert await one.status() == 200
            await until_held(facade, LARGE - SMALL)
            async with sending(facade, length()) as third:
                third.writer.write(padded())
                assert await third.status() == 200
            two.writer.close()  # whoever leaves takes nothing along
            await until_held(facade, 0)


async def test_it_is_held_until_the_answer_ends(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, **LIMITS) as facade:
        facade.fake.script(Script((Accept(), Progress(), Emit((504,)), Hang(), Finish())))
        async with AsyncExitStack() as stack:
            for _ in range(2):
                sender = await stack.enter_async_context(sending(facade, length()))
                sender.writer.write(padded())
            await until(lambda: len(facade.fake.calls) == 2)
            assert await held_bytes(facade) == 2 * (LARGE - SMALL)
            async with sending(facade, length()) as third:
                await third.check_refused()
        await until_held(facade, 0)


async def test_a_body_that_does_not_say_its_length_is_counted_as_it_comes(
    embedded_model_dir: Path,
) -> None:
    async with facade_and_fake(embedded_model_dir, **LIMITS) as facade:
        facade.say("fine")
        chunk = b"%x\r\n%s\r\n" % (LARGE, padded())
        async with AsyncExitStack() as stack:
            one, two, third = [
                await stack.enter_async_context(sending(facade, "Transfer-Encoding: chunked"))
                for _ in range(3)
            ]
            for sender in (one, two):
                sender.writer.write(chunk)
            await until_held(facade, 2 * (LARGE - SMALL))
            third.writer.write(chunk[: SMALL // 2])
            await asyncio.sleep(0.05)
            third.writer.write(chunk[SMALL // 2 :])
            await third.check_refused()
            one.writer.write(b"0\r\n\r\n")
            assert await one.status() == 200
        await until_held(facade, 0)


async def test_refused_bodies_of_other_kinds_leave_nothing_behind(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, **LIMITS) as facade:
        for headers, body, status in (
            ([length()], b"x" * LARGE, 400),
            ([length(600 * KIB)], b"", 413),
            (["Transfer-Encoding: chunked"], b"%x\r\n%s\r\n" % (600 * KIB, b" " * 600 * KIB), 413),
            ([length(), "Content-Encoding: gzip"], b"x" * LARGE, 400),
        ):
            async with sending(facade, *headers) as sender:
                sender.writer.write(body)
                assert await sender.status() == status
        await until_held(facade, 0)
