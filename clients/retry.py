"""When a call that failed is tried again.

Only EngineUnavailable, and QueueFull that says when to come back; only before the request was
accepted; inside the deadline and never before the engine's hint.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from clients.errors import EngineUnavailable, QueueFull
from clients.options import ClientOptions

T = TypeVar("T")


class Deadline:
    """A point on the monotonic clock that all attempts of a call share."""

    def __init__(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None and not timeout_seconds >= 0:
            raise ValueError("a timeout must not be negative")
        self._at = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def remaining_seconds(self) -> float | None:
        """None: no deadline; never negative."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def leaves(self, seconds: float) -> bool:
        return self._at is None or time.monotonic() + seconds < self._at


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int
    initial_backoff_seconds: float
    max_backoff_seconds: float
    max_wait_seconds: float

    @classmethod
    def from_options(cls, options: ClientOptions) -> RetryPolicy:
        return cls(
            max_attempts=options.max_attempts,
            initial_backoff_seconds=options.initial_backoff_seconds,
            max_backoff_seconds=options.max_backoff_seconds,
            max_wait_seconds=options.max_retry_wait_seconds,
        )

    def delay_seconds(
        self, attempt: int, error: EngineUnavailable | QueueFull, jitter: float
    ) -> float | None:
        """How long to wait after failed attempt number `attempt` (from 1); None: give up.

        hint + backoff · jitter, with jitter in [0, 1]: callers that were refused together do not
        come back together.
        """
        hint = error.retry_after_seconds
        if attempt >= self.max_attempts or (isinstance(error, QueueFull) and hint is None):
            return None
        if hint is not None and hint > self.max_wait_seconds:
            return None
        doublings = min(attempt - 1, 30)  # more than any maximum allows
        backoff = min(self.initial_backoff_seconds * (1 << doublings), self.max_backoff_seconds)
        # Without a hint at least half of the back-off is waited: retrying at once helps nobody.
        return backoff * (0.5 + 0.5 * jitter) if hint is None else hint + backoff * jitter


async def retrying(
    attempt_call: Callable[[int], Awaitable[T]], *, policy: RetryPolicy, deadline: Deadline
) -> T:
    """Awaits `attempt_call(1)`, and again with 2, 3, ... as the policy allows."""
    for attempt in itertools.count(1):
        try:
            return await attempt_call(attempt)
        except (EngineUnavailable, QueueFull) as error:
            delay = policy.delay_seconds(attempt, error, random.random())
            if delay is None or not deadline.leaves(delay):
                raise
        await asyncio.sleep(delay)
    raise AssertionError("unreachable: attempts are counted without end")
