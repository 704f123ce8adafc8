"""A limit on each write, and on nothing else."""

from __future__ import annotations

import asyncio

import pytest

from engine_service.errors import SlowReader
from engine_service.slow_reader import SlowReaderLimit

pytestmark = pytest.mark.usefixtures("virtual_clock")

LIMIT_SECONDS = 0.2


async def test_a_write_that_takes_too_long_is_a_slow_reader() -> None:
    async def write() -> None:
        async with SlowReaderLimit(LIMIT_SECONDS) as limit:
            await asyncio.sleep(0.1)  # not a write
            await limit.watch(asyncio.sleep(60))

    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(SlowReader, match=r"no progress for 0\.2 s"):
        await write()
    assert loop.time() - began == pytest.approx(0.1 + LIMIT_SECONDS)


async def test_neither_many_writes_nor_waits_between_them_count() -> None:
    async with SlowReaderLimit(LIMIT_SECONDS) as limit:
        for _ in range(6):
            await limit.watch(asyncio.sleep(0.05))
        await asyncio.sleep(2 * LIMIT_SECONDS)
        await limit.watch(asyncio.sleep(0))


async def test_a_write_that_fails_is_no_write_that_goes_on() -> None:
    async def fail() -> None:
        raise ConnectionError

    async with SlowReaderLimit(LIMIT_SECONDS) as limit:
        with pytest.raises(ConnectionError):
            await limit.watch(fail())
        await asyncio.sleep(2 * LIMIT_SECONDS)


async def test_a_callers_cancellation_stays_one() -> None:
    async def write() -> None:
        async with SlowReaderLimit(LIMIT_SECONDS) as limit:
            await limit.watch(asyncio.sleep(60))

    task = asyncio.create_task(write())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
