"""Leaving a stream early ends it at the engine, however it is left, and nothing accumulates."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from pathlib import Path

import pytest

from clients import CallCancelled, Delta, EngineClient, EngineUnavailable
from clients.testing import Accept, Emit, FakeEngine, Hang, Outcome, Script
from tests.client_pair import all_events, connected, prompt

ENDLESS = Script((Accept(), Emit((1,)), Hang()))


async def _first_delta(client: EngineClient) -> None:
    async with client.generate(prompt()) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                break


async def test_leaving_the_block_cancels() -> None:
    async with connected() as (fake, client):
        fake.script(ENDLESS)
        await _first_delta(client)
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED


async def test_aclose_cancels_and_ends_the_iteration() -> None:
    async with connected() as (fake, client):
        fake.script(ENDLESS)
        stream = client.generate(prompt())
        await stream.wait_accepted()
        await stream.aclose()
        await stream.aclose()
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED
        assert [event async for event in stream] == []


async def test_an_error_in_the_block_cancels() -> None:
    async with connected() as (fake, client):
        fake.script(ENDLESS)

        async def fail() -> None:
            async with client.generate(prompt()) as stream:
                await stream.wait_accepted()
                raise KeyError("the caller's own")

        with pytest.raises(KeyError):
            await fail()
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED


@pytest.mark.parametrize("steps", [(), (Accept(),), (Accept(), Emit((1,)))])
async def test_cancelling_the_reading_task_cancels(steps: tuple[Accept | Emit, ...]) -> None:
    """Without `async with`: before Accepted, and in mid-stream."""
    async with connected() as (fake, client):
        fake.script(Script((*steps, Hang())))
        stream = client.generate(prompt())

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        (call,) = await fake.wait_for_calls(1)
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await call.wait_closed() is Outcome.CANCELLED
        assert [event async for event in stream] == []


async def test_a_timeout_around_the_reader_is_a_timeout() -> None:
    async with connected() as (fake, client):
        fake.script(ENDLESS)
        stream = client.generate(prompt())
        await stream.wait_accepted()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await all_events(stream)
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED


async def test_cancelling_between_attempts_leaves_nothing() -> None:
    async with connected() as (fake, client):
        fake.script(Script.failing(EngineUnavailable("down", retry_after_seconds=10.0)))
        reading = asyncio.create_task(all_events(client.generate(prompt())))
        await fake.wait_for_calls(1)
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert len(fake.calls) == 1


async def test_closing_under_a_reader_tells_it() -> None:
    """Another task closes: the reader must not take that for the end of the text."""
    async with connected() as (fake, client):
        fake.script(ENDLESS)
        stream = client.generate(prompt("mine"))
        reading = asyncio.create_task(all_events(stream))
        await fake.wait_for_calls(1)
        await asyncio.sleep(0.05)
        await stream.aclose()
        with pytest.raises(CallCancelled) as failure:
            await reading
        assert failure.value.request_id == "mine"


async def test_a_stream_that_is_dropped_is_cancelled_when_collected() -> None:
    """Recent grpcio no longer does that by itself (CASES C6)."""
    async with connected() as (fake, client):
        fake.script(ENDLESS)
        stream = client.generate(prompt())
        await stream.wait_accepted()
        del stream
        gc.collect()
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED


async def test_leaving_after_the_last_event_is_no_cancellation() -> None:
    async with connected() as (fake, client):
        async with client.generate(prompt()) as stream:
            async for event in stream:
                if type(event).__name__ == "Finished":
                    break
        assert await fake.calls[0].wait_closed() is Outcome.FINISHED


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


async def test_nothing_accumulates(caplog: pytest.LogCaptureFixture) -> None:
    """CASES C6: rounds of streams that are left after one delta."""
    streams, width, rounds = 200, 25, 4
    sizes: list[int] = []
    fake = FakeEngine()
    async with connected(fake=fake) as (_, client):
        fake.script(ENDLESS)
        await _first_delta(client)
        assert await fake.calls[0].wait_closed() is Outcome.CANCELLED
        num_tasks = len(asyncio.all_tasks())  # the fake server's own
        for _ in range(rounds):
            for _ in range(streams // width):
                async with asyncio.TaskGroup() as group:
                    for _ in range(width):
                        group.create_task(_first_delta(client))
            for call in fake.calls:
                assert await call.wait_closed() is Outcome.CANCELLED
            fake.calls.clear()
            gc.collect()
            sizes.append(_resident_pages())
        deadline = time.monotonic() + 10
        while len(asyncio.all_tasks()) > num_tasks:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    assert sizes[-1] - sizes[1] < 0.05 * sizes[1]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
