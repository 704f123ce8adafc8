"""Deltas between the calls of a request and the handler: in order, bounded, silence noticed."""

from __future__ import annotations

import asyncio

import pytest

from http_facade.delta_mailbox import DeltaMailbox
from http_facade.output_processor import ChoiceDelta

pytestmark = pytest.mark.usefixtures("virtual_clock")


def delta(number: int) -> ChoiceDelta:
    return ChoiceDelta(number)


async def reading(mailbox: DeltaMailbox) -> asyncio.Task[list[ChoiceDelta] | None]:
    """A reader that waits."""
    reader = asyncio.create_task(mailbox.take(None))
    await asyncio.sleep(0)
    assert not reader.done()
    return reader


async def test_a_reader_gets_all_that_has_arrived_in_order() -> None:
    mailbox = DeltaMailbox(2, 8)
    for number in range(3):
        await mailbox.put(delta(number))
    assert await mailbox.take(None) == [delta(0), delta(1), delta(2)]
    reader = await reading(mailbox)
    await mailbox.put(delta(3))
    await mailbox.put(delta(4))  # before the reader runs: still one batch
    assert await reader == [delta(3), delta(4)]


async def test_the_end_comes_when_all_writers_have_ended() -> None:
    mailbox = DeltaMailbox(2, 8)
    reader = await reading(mailbox)
    mailbox.end(None)
    await asyncio.sleep(0)
    assert not reader.done()
    await mailbox.put(delta(1))
    mailbox.end(None)
    assert await reader == [delta(1)]
    assert await mailbox.take(None) is None
    assert await mailbox.take(0.01) is None


async def test_a_failure_comes_after_what_was_there_before_it() -> None:
    mailbox = DeltaMailbox(2, 8)
    await mailbox.put(delta(1))
    mailbox.end(ValueError("first"))
    mailbox.end(ValueError("second"))
    assert await mailbox.take(None) == [delta(1)]
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await mailbox.take(None)


async def test_failing_from_outside_comes_before_what_waits() -> None:
    mailbox = DeltaMailbox(1, 8)
    await mailbox.put(delta(1))
    mailbox.fail(ValueError("stop"))
    with pytest.raises(ValueError, match="stop"):
        await mailbox.take(None)
    idle = DeltaMailbox(1, 8)
    reader = await reading(idle)
    idle.fail(ValueError("stop"))
    with pytest.raises(ValueError, match="stop"):
        await reader


async def test_writers_wait_while_it_is_full() -> None:
    mailbox = DeltaMailbox(2, 2)
    writers = [asyncio.create_task(write(mailbox, first)) for first in (0, 100)]
    await asyncio.sleep(0.01)
    seen: list[ChoiceDelta] = []
    while batch := await mailbox.take(None):
        assert len(batch) <= 2
        seen += batch
        await asyncio.sleep(0)
    await asyncio.gather(*writers)
    for first in (0, 100):
        numbers = [one.index for one in seen if first <= one.index < first + 10]
        assert numbers == list(range(first, first + 10))


async def write(mailbox: DeltaMailbox, first: int) -> None:
    for number in range(first, first + 10):
        await mailbox.put(delta(number))
    mailbox.end(None)


async def test_silence_is_told_after_its_time_and_again() -> None:
    mailbox = DeltaMailbox(1, 8)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        began = loop.time()
        assert await mailbox.take(0.05) == []
        assert loop.time() - began == pytest.approx(0.05)
    mailbox.close()


async def test_what_arrives_puts_silence_off() -> None:
    mailbox = DeltaMailbox(1, 8)
    writer = asyncio.create_task(write_slowly(mailbox))
    for number in range(6):  # together longer than the silence
        assert await mailbox.take(0.2) == [delta(number)]
    assert await mailbox.take(0.2) == []
    await writer
    mailbox.close()


async def write_slowly(mailbox: DeltaMailbox) -> None:
    for number in range(6):
        await asyncio.sleep(0.06)
        await mailbox.put(delta(number))


async def test_a_cancelled_reader_loses_nothing() -> None:
    mailbox = DeltaMailbox(1, 8)
    reader = await reading(mailbox)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await mailbox.put(delta(1))
    assert await mailbox.take(None) == [delta(1)]
