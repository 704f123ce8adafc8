"""Closed loops: so many streams at a time, each sends its next request when one is answered.

Both loops add to the caller's lists as they go, so that a cancelled one leaves what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from clients.bench.answer import Answer
from clients.bench.target import Call
from clients.bench.workloads import Window

_LAST_ARRIVAL_SECONDS = 0.5  # before the end: a later long prompt would meet no stream


async def closed_loop(calls: Iterable[Call], concurrency: int, answers: list[Answer]) -> None:
    """Returns when every call has ended."""
    waiting = iter(calls)
    async with asyncio.TaskGroup() as streams:
        for _ in range(concurrency):
            streams.create_task(_work_off(waiting, answers))


async def _work_off(waiting: Iterator[Call], answers: list[Answer]) -> None:
    for call in waiting:
        await _answered(call, answers)


async def windowed_loop(
    make_call: Callable[[int], Call],
    long_calls: Sequence[Call],
    concurrency: int,
    window: Window,
    answers: list[Answer],
    long_answers: list[Answer],
) -> None:
    """Streams for some seconds, while long prompts come one by one; see `Window`.

    `make_call(n)` prepares the nth stream's call. The streams decide when it is over: a long
    prompt that outlives them is cut off.
    """
    end = asyncio.get_running_loop().time() + window.duration_seconds
    async with asyncio.TaskGroup() as group:
        arrivals = group.create_task(_long_arrivals(long_calls, window, end, long_answers))
        numbers = itertools.count()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end + window.grace_seconds), asyncio.TaskGroup() as short:
                for _ in range(concurrency):
                    short.create_task(_stream_until(end, make_call, numbers, answers))
        arrivals.cancel()


async def _stream_until(
    end: float, make_call: Callable[[int], Call], numbers: Iterator[int], answers: list[Answer]
) -> None:
    loop = asyncio.get_running_loop()
    for number in numbers:
        if loop.time() >= end:
            return
        await _answered(make_call(number), answers)


async def _long_arrivals(
    calls: Sequence[Call], window: Window, end: float, answers: list[Answer]
) -> None:
    await asyncio.sleep(window.long_start_seconds)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            if loop.time() >= end - _LAST_ARRIVAL_SECONDS:
                return
            group.create_task(_answered(call, answers))
            await asyncio.sleep(window.long_interval_seconds)


async def _answered(call: Call, answers: list[Answer]) -> None:
    answer = Answer()
    answers.append(answer)
    await call(answer)
