"""The door: how much may wait for its first step, and when a refused caller should come again.

What is counted are samples (a request for n counts as n) and their prompt tokens, from admission
to their first step. The retry hint is the overflow divided by the measured drain rate.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from engine_service.errors import QueueFull

_WINDOW_SECONDS: Final = 30.0
_MIN_RETRY_SECONDS: Final = 0.25
_MAX_RETRY_SECONDS: Final = 60.0
_UNKNOWN_RETRY_SECONDS: Final = 1.0  # nothing drained yet


class DrainRate:
    """Samples that left the queue for a step, over the last half minute."""

    def __init__(self) -> None:
        self._departures: deque[float] = deque()

    def departed(self, now_seconds: float) -> None:
        self._departures.append(now_seconds)
        self._forget(now_seconds)

    def seconds_for(self, num_samples: int, now_seconds: float) -> float:
        self._forget(now_seconds)
        if not self._departures:
            return _UNKNOWN_RETRY_SECONDS
        span = max(now_seconds - self._departures[0], 0.1)
        return num_samples * span / len(self._departures)

    def _forget(self, now_seconds: float) -> None:
        while self._departures and now_seconds - self._departures[0] > _WINDOW_SECONDS:
            self._departures.popleft()


class Admission:
    def __init__(self, max_queued_samples: int, max_queued_tokens: int) -> None:
        self._max_samples = max_queued_samples
        self._max_tokens = max_queued_tokens
        self._drain_rate = DrainRate()
        self.num_queued_samples = 0
        self.num_queued_tokens = 0

    def enter(self, num_samples: int, tokens_each: int, now_seconds: float) -> None:
        """Raises QueueFull and changes nothing when the limits don't allow it.

        One request alone may exceed the token limit: else it could never be served.
        """
        overflow = self.num_queued_samples + num_samples - self._max_samples
        num_tokens = num_samples * tokens_each
        too_many_tokens = self.num_queued_tokens + num_tokens > self._max_tokens
        if overflow > 0 or (too_many_tokens and self.num_queued_samples):
            raise QueueFull(
                f"the queue is full: {self.num_queued_samples} samples with"
                f" {self.num_queued_tokens} prompt tokens wait",
                retry_after_seconds=self._retry_after(max(overflow, num_samples), now_seconds),
            )
        self.num_queued_samples += num_samples
        self.num_queued_tokens += num_tokens

    def leave(self, tokens: int, now_seconds: float, *, scheduled: bool) -> None:
        """One sample no longer waits; `scheduled`: for its first step, not aborted."""
        self.num_queued_samples -= 1
        self.num_queued_tokens -= tokens
        if scheduled:
            self._drain_rate.departed(now_seconds)

    def reset(self) -> None:
        """The core died, and the queue with it."""
        self.num_queued_samples = 0
        self.num_queued_tokens = 0

    def _retry_after(self, num_samples: int, now_seconds: float) -> float:
        seconds = self._drain_rate.seconds_for(num_samples, now_seconds)
        return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
