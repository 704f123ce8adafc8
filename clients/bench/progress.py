"""How far a run is, on stderr, while it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

from clients.bench.answer import Answer

_TERMINAL_SECONDS = 1.0  # between updates of one line
_LOG_SECONDS = 10.0  # between lines of their own
_CLEAR_LINE = "\r\033[K"


@dataclass(frozen=True, slots=True)
class Progress:
    is_quiet: bool = False

    def say(self, text: str) -> None:
        if not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    @asynccontextmanager
    async def shown(
        self, title: str, answers: Sequence[Answer], num_requests: int
    ) -> AsyncIterator[None]:
        """While the block runs, in which `answers` grows; 0 requests: nobody knows how many."""
        if self.is_quiet:
            yield
            return
        ticker = asyncio.create_task(_tick(title, answers, num_requests))
        try:
            yield
        finally:
            ticker.cancel()
            await asyncio.wait((ticker,))


async def _tick(title: str, answers: Sequence[Answer], num_requests: int) -> None:
    is_terminal = sys.stderr.isatty()
    start = perf_counter()
    with contextlib.ExitStack() as stack:
        if is_terminal:
            stack.callback(_write, _CLEAR_LINE)
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS if is_terminal else _LOG_SECONDS)
            line = f"{title}: {_line(answers, num_requests)}, {perf_counter() - start:.0f} s"
            _write(_CLEAR_LINE + line if is_terminal else line + "\n")


def _line(answers: Sequence[Answer], num_requests: int) -> str:
    done = sum(answer.ended_seconds is not None for answer in answers)
    failed = sum(answer.failure is not None for answer in answers)
    of = f" of {num_requests}" if num_requests else ""
    return f"{done}{of} answered, {len(answers) - done} open, {failed} failed"


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
