"""Time that passes only while every task waits: for tests of timers alone.

Code takes no time, however long the machine takes for it, and waiting ends at once: what such a
test sees depends on neither. Not for threads, processes or sockets: nobody waits for those.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Protocol, cast

import pytest


class _SelectorLoop(Protocol):
    _selector: selectors.BaseSelector


class VirtualClock:
    """Takes the place of `time.monotonic` and of the running loop's own clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_seconds = 1000.0
        selector = cast("_SelectorLoop", loop)._selector
        self._select = selector.select
        monkeypatch.setattr(selector, "select", self._wait)
        monkeypatch.setattr(loop, "time", self.seconds)
        monkeypatch.setattr("time.monotonic", self.seconds)
        monkeypatch.setattr("time.monotonic_ns", self.nanoseconds)

    def seconds(self) -> float:
        return self._now_seconds

    def nanoseconds(self) -> int:
        return round(self._now_seconds * 1e9)

    def _wait(self, timeout_seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """The loop's wait for its next timer, None where it has none."""
        events = self._select(0 if timeout_seconds else timeout_seconds)
        if timeout_seconds and not events:
            self._now_seconds += timeout_seconds
        return events
