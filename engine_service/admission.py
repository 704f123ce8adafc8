"""The door: how much may wait for its first step, and when a refused caller should come again.

What is counted are samples (a request for n counts as n) and their prompt tokens, from admission
to their first step. A request is refused if there is no room for it, or if those before it are
predicted to leave too late for it:

    predicted wait = samples that wait / drain rate

The drain rate is measured by a clock that runs only while something waits, so an idle hour says
nothing about how fast a queue drains. The hint of a refusal is the time in which enough samples
leave, at that rate, for the same request to be let in. With nothing waiting, nobody is refused for
the wait, so a pessimistic measurement is always corrected by the next request. The prediction is
for the end of the queue: whom priority or fair share would take sooner may be refused too early.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from engine_service.errors import QueueFull, WaitTooLong

_WINDOW_SECONDS: Final = 30.0
_MIN_RETRY_SECONDS: Final = 0.25
_MAX_RETRY_SECONDS: Final = 60.0
_UNKNOWN_RETRY_SECONDS: Final = 1.0  # nothing drained yet


class DrainRate:
    """How fast samples leave the queue for a step, over the last half minute of queueing.

    All times are seconds of the queueing clock; `queueing` starts and stops it.
    """

    def __init__(self) -> None:
        self._departures: deque[float] = deque()
        self._elapsed_seconds = 0.0  # up to the last change
        self._running_since: float | None = None

    def queueing(self, is_queueing: bool, now_seconds: float) -> None:
        if is_queueing == (self._running_since is not None):
            return
        self._elapsed_seconds = self._clock(now_seconds)
        self._running_since = now_seconds if is_queueing else None

    def departed(self, now_seconds: float) -> None:
        self._departures.append(self._clock(now_seconds))

    def seconds_for(self, num_samples: int, now_seconds: float) -> float | None:
        """Until that many have left; None: nothing was measured yet.

        Time without a departure counts: a queue that stands still becomes slower by the second.
        """
        clock = self._clock(now_seconds)
        while self._departures and self._departures[0] <= clock - _WINDOW_SECONDS:
            self._departures.popleft()
        window = min(clock, _WINDOW_SECONDS)
        if self._departures:
            return num_samples * window / len(self._departures)
        return num_samples * window if clock > _WINDOW_SECONDS else None

    def _clock(self, now_seconds: float) -> float:
        since = self._running_since
        return self._elapsed_seconds + (0.0 if since is None else now_seconds - since)


class Admission:
    def __init__(
        self, max_queued_samples: int, max_queued_tokens: int, max_wait_seconds: float = math.inf
    ) -> None:
        self._max_samples = max_queued_samples
        self._max_tokens = max_queued_tokens
        self._max_wait_seconds = max_wait_seconds
        self._drain_rate = DrainRate()
        self.num_queued_samples = 0
        self.num_queued_tokens = 0

    def enter(
        self,
        num_samples: int,
        tokens_each: int,
        now_seconds: float,
        patience_seconds: float = math.inf,
    ) -> None:
        """`patience_seconds`: after that the request is of no use to its caller.

        Raises QueueFull (or WaitTooLong, one kind of it) and changes nothing when it may not wait.
        One request alone may exceed the token limit: else it could never be served.
        """
        self._check_room(num_samples, num_samples * tokens_each, now_seconds)
        self._check_wait(min(self._max_wait_seconds, patience_seconds), now_seconds)
        self.num_queued_samples += num_samples
        self.num_queued_tokens += num_samples * tokens_each
        self._drain_rate.queueing(True, now_seconds)

    def leave(self, tokens: int, now_seconds: float, *, scheduled: bool) -> None:
        """One sample no longer waits; `scheduled`: for its first step, not aborted."""
        if scheduled:
            self._drain_rate.departed(now_seconds)
        self.num_queued_samples -= 1
        self.num_queued_tokens -= tokens
        self._drain_rate.queueing(self.num_queued_samples > 0, now_seconds)

    def reset(self, now_seconds: float) -> None:
        """The core died, and the queue with it."""
        self.num_queued_samples = 0
        self.num_queued_tokens = 0
        self._drain_rate.queueing(False, now_seconds)

    def _check_room(self, num_samples: int, num_tokens: int, now_seconds: float) -> None:
        overflow = self.num_queued_samples + num_samples - self._max_samples
        if overflow <= 0 and self.num_queued_samples:
            too_many_tokens = self.num_queued_tokens + num_tokens - self._max_tokens
            tokens_each = self.num_queued_tokens / self.num_queued_samples  # of those that wait
            overflow = math.ceil(min(too_many_tokens / tokens_each, self.num_queued_samples))
        if overflow > 0:
            raise QueueFull(
                f"the queue is full: {self.num_queued_samples} samples with"
                f" {self.num_queued_tokens} prompt tokens wait",
                retry_after_seconds=self._hint(self._drain_rate.seconds_for(overflow, now_seconds)),
            )

    def _check_wait(self, max_wait_seconds: float, now_seconds: float) -> None:
        if self.num_queued_samples == 0:
            return  # also for a deadline that has passed: to say so is the core's part
        wait_seconds = self._drain_rate.seconds_for(self.num_queued_samples, now_seconds)
        if wait_seconds is not None and wait_seconds > max_wait_seconds:
            raise WaitTooLong(
                f"{self.num_queued_samples} samples wait, for {wait_seconds:.1f} s as it seems:"
                f" longer than the {max_wait_seconds:.1f} s that this request may wait",
                retry_after_seconds=self._hint(wait_seconds - max_wait_seconds),
            )

    def _hint(self, seconds: float | None) -> float:
        known = _UNKNOWN_RETRY_SECONDS if seconds is None else seconds
        return min(max(known, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
