"""Between the calls of one request and the handler that writes its answer: in order, bounded.

    pump per call --put, put, ... end--> [ deltas ] --take--> handler

A pump waits while the mailbox is full. The reader gets all that has arrived at once, and is woken
once for it. Silence is noticed by one timer a period; `asyncio.timeout` would set one a token.
"""

from __future__ import annotations

import asyncio

from http_facade.output_processor import ChoiceDelta


class DeltaMailbox:
    """Several writers and one reader, all on one event loop."""

    def __init__(self, num_writers: int, max_deltas: int) -> None:
        self._num_writers = num_writers  # that have not ended
        self._max_deltas = max_deltas
        self._deltas: list[ChoiceDelta] = []
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[bool] | None = None  # what the reader waits for; False: in vain
        self._room = asyncio.Event()
        self._room.set()
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ writers

    async def put(self, delta: ChoiceDelta) -> None:
        while len(self._deltas) >= self._max_deltas:
            self._room.clear()
            await self._room.wait()
        self._deltas.append(delta)
        self._wake()

    def end(self, failure: Exception | None) -> None:
        """A writer puts nothing more; the reader gets its failure after what is waiting."""
        self._num_writers -= 1
        self._failure = self._failure or failure
        self._wake()

    def fail(self, error: Exception) -> None:
        """The reader gets `error` next, in place of what is waiting."""
        self._deltas.clear()
        self._failure = error
        self._wake()

    # ------------------------------------------------------------ the reader

    async def take(self, silence_seconds: float | None) -> list[ChoiceDelta] | None:
        """All that has arrived, at least one; nothing after that long a silence; None when all
        writers have ended. Raises a writer's failure."""
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            if not self._num_writers:
                return None
            if not await self._wait(silence_seconds):
                return []
        deltas, self._deltas = self._deltas, []
        self._room.set()
        return deltas

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ inside

    def _wake(self, *, news: bool = True) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(news)

    async def _wait(self, silence_seconds: float | None) -> bool:
        """Whether there is news; False: silence."""
        self._news = self._loop.create_future()
        if silence_seconds is not None:
            self._waiting_since = self._loop.time()
            if self._timer is None:
                self._look(silence_seconds)
        return await self._news

    def _look(self, silence_seconds: float) -> None:
        """Ends the wait that goes on, if it began so long ago; looks again when that may be."""
        self._timer = None
        if self._news is None or self._news.done():
            return  # the next wait begins to look anew
        due = self._waiting_since + silence_seconds
        if due <= self._loop.time():
            self._wake(news=False)
        else:
            self._timer = self._loop.call_at(due, self._look, silence_seconds)
