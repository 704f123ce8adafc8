"""So many connections and no more: who rests goes first, and probes are answered all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from clients.testing import Accept, Emit, Finish, Hang, Progress, Script
from http_facade import open_files
from tests.facade_harness import CHAT, Harness, chat, facade_and_fake, until

LIMIT = 3
PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(facade: Harness) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", facade.running.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(connection: Streams, request: bytes) -> tuple[int, bytes]:
    """Status, and the whole head."""
    reader, writer = connection
    writer.write(request)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    return int(head.split()[1]), head


async def is_closed(connection: Streams) -> bool:
    try:
        return await asyncio.wait_for(connection[0].read(), 60) == b""
    except ConnectionError:
        return True


@asynccontextmanager
async def busy(facade: Harness, num_connections: int) -> AsyncIterator[list[Streams]]:
    """Requests that don't end."""
    facade.fake.script(Script((Accept(), Progress(), Emit((504,)), Hang(), Finish())))
    held = [await facade.send_raw(CHAT, chat()) for _ in range(num_connections)]
    await until(lambda: len(facade.fake.calls) == num_connections)
    try:
        yield held
    finally:
        for _, writer in held:
            writer.close()


@asynccontextmanager
async def facade_of(model_dir: Path) -> AsyncIterator[Harness]:
    """Where nothing of the start is left."""
    async with facade_and_fake(model_dir, max_connections=LIMIT) as facade:
        yield facade


async def test_beyond_the_limit_only_probes_are_answered(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("http_facade.connections._MIN_WAIT_SECONDS", 0.0)
    async with facade_of(embedded_model_dir) as facade, busy(facade, LIMIT) as held:
        for request, expected in ((MODELS, 503), (PROBE, 200), (MODELS, 503)):
            async with connected(facade) as one:
                status, head = await ask(one, request)
                assert status == expected
                assert b"Connection: close" in head
                assert (b"Retry-After: 1" in head) == (status == 503)
                assert await is_closed(one)
        assert caplog.text.count("--max-connections") == 1
        held[0][1].close()
        async with asyncio.timeout(60):
            while True:  # until it is seen that it left
                async with connected(facade) as one:
                    if (await ask(one, MODELS))[0] == 200:
                        assert (await ask(one, MODELS))[0] == 200  # and stays open
                        break


async def test_who_waits_for_a_request_goes_for_a_new_one(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_facade.connections._MIN_WAIT_SECONDS", 0.0)
    async with (
        facade_of(embedded_model_dir) as facade,
        busy(facade, 1) as [running],
        connected(facade) as silent,
        connected(facade) as resting,
    ):
        assert (await ask(resting, MODELS))[0] == 200
        silent[1].write(MODELS[:10])  # half a head is none
        async with connected(facade) as first:
            assert await is_closed(silent)
            assert (await ask(first, MODELS))[0] == 200
            async with connected(facade) as second:
                assert await is_closed(resting)
                assert (await ask(second, MODELS))[0] == 200
                assert (await ask(first, MODELS))[0] == 200
        assert not running[0].at_eof()


async def test_new_ones_have_a_moment_to_ask(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_facade.connections._MIN_WAIT_SECONDS", 3_600.0)
    async with facade_of(embedded_model_dir) as facade, AsyncExitStack() as stack:
        within = [await stack.enter_async_context(connected(facade)) for _ in range(LIMIT)]
        for one in within:
            assert (await ask(one, MODELS))[0] == 200
        async with connected(facade) as other:
            assert (await ask(other, MODELS))[0] == 503
        for one in within:
            assert (await ask(one, MODELS))[0] == 200


async def test_few_are_heard_beyond_the_limit(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_facade.connections._MAX_OVER_LIMIT", 2)
    async with (
        facade_of(embedded_model_dir) as facade,
        busy(facade, LIMIT),
        connected(facade) as one,
        connected(facade) as two,
        connected(facade) as unheard,
    ):
        assert await is_closed(unheard)
        for heard in (two, one):
            assert (await ask(heard, PROBE))[0] == 200


async def test_who_keeps_silent_beyond_the_limit_is_soon_left(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http_facade.patience._HEAD_SECONDS_OVER_LIMIT", 0.2)
    async with (
        facade_of(embedded_model_dir) as facade,
        busy(facade, LIMIT),
        connected(facade) as silent,
    ):
        assert await is_closed(silent)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "set_to"),
    [
        (1_024, 524_288, 4_096, 4_096, 4_608),
        (1_024, -1, 4_096, 4_096, 4_608),
        (1_024, 2_048, 4_096, 1_536, 2_048),
        (1_024, 524_288, 100, 100, None),
        (-1, -1, 4_096, 4_096, None),
        (400, 400, 4_096, 200, 400),
    ],
)
def test_open_files_are_allowed_for_as_many(
    soft: int,
    hard: int,
    wanted: int,
    allowed: int,
    set_to: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """-1: without a limit."""
    new: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda which, pair: new.append(pair))
    assert open_files.allow_connections(wanted) == allowed
    assert new == ([] if set_to is None else [(set_to, hard)])
    assert ("ulimit -n" in caplog.text) == (allowed < wanted)
