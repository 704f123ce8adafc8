"""A limit on how long one write to a stream's reader may take, at next to no price per write.

    async with SlowReaderLimit(seconds) as limit:
        for message in messages:
            await limit.watch(write(message))

`asyncio.timeout` around each write would set a timer for each token. Here one timer a period looks
whether the write that goes on, if one does, began too long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from engine_service.errors import SlowReader


class SlowReaderLimit:
    """Cancels what is inside when a write takes too long, and turns that into SlowReader."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._started_at: float | None = None  # of the write that goes on, by the loop's clock

    async def watch(self, write: Awaitable[None]) -> None:
        self._started_at = self._loop.time()
        try:
            await write
        finally:
            self._started_at = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(exc_type, exc, traceback)
        except TimeoutError:
            raise SlowReader(
                f"the stream's reader made no progress for {self._seconds:g} s"
            ) from None

    def _look(self) -> None:
        now = self._loop.time()
        due = self._seconds + (now if self._started_at is None else self._started_at)
        if due <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._look)
