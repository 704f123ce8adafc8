"""How much one key may: requests and tokens a minute, and requests at once; in memory.

Requests and tokens come from buckets that hold a minute's worth and fill steadily, so that the
time until there is enough is known to the millisecond:

    seconds until `amount` is there = (amount - available) / (limit / 60)

A request reserves its prompt and the most that it may generate, and gets back at its end what it
did not use. What runs can so only bring a refused request's time nearer: who comes back after the
hint is let in, unless others came in between. What asks for more than a whole bucket waits for a
full one and leaves it in debt.

When a place among the requests at once comes free can't be known; that hint is a forecast, from how
long this key's requests took lately.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_MIN_PLACE_SECONDS = 0.5  # no hint about a place is nearer
_UNKNOWN_PLACE_SECONDS = 1.0  # no request of the key has ended yet
_NUM_DURATIONS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Quota:
    """One bucket, as its key's holder may know it."""

    limit: int  # a minute
    remaining: int
    reset_seconds: float  # until it is full again


class RateLimited(Exception):
    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class _Bucket:
    """All times are seconds of one clock."""

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._available = float(limit)  # negative: in debt
        self._updated = now

    def resize(self, limit: int, now: float) -> None:
        """What was used stays used."""
        self._refill(now)
        self._available += limit - self._limit
        self._limit = limit

    def seconds_until(self, amount: float, now: float) -> float:
        self._refill(now)
        missing = min(amount, self._limit) - self._available
        return max(missing, 0.0) * 60 / self._limit

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._available -= amount

    def give_back(self, amount: float, now: float) -> None:
        self._refill(now)
        self._available = min(self._available + amount, float(self._limit))

    def quota(self, now: float) -> Quota:
        reset_seconds = self.seconds_until(self._limit, now)
        return Quota(self._limit, max(int(self._available + 1e-6), 0), reset_seconds)

    def _refill(self, now: float) -> None:
        filled = self._available + (now - self._updated) * self._limit / 60
        self._available = min(filled, float(self._limit))
        self._updated = now


def _resized(bucket: _Bucket | None, limit: int | None, now: float) -> _Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return _Bucket(limit, now)
    bucket.resize(limit, now)
    return bucket


class _KeyUse:
    """What one key has in use."""

    def __init__(self) -> None:
        self.limits = NO_LIMITS
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None
        self.running: deque[float] = deque()  # when each began, the oldest first
        self.durations: deque[float] = deque(maxlen=_NUM_DURATIONS)  # seconds

    def set_limits(self, limits: Limits, now: float) -> None:
        if limits != self.limits:
            self.limits = limits
            self.requests = _resized(self.requests, limits.requests_per_minute, now)
            self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)

    def quotas(self, now: float) -> dict[str, Quota]:
        buckets = (("requests", self.requests), ("tokens", self.tokens))
        return {name: bucket.quota(now) for name, bucket in buckets if bucket is not None}

    def place_seconds(self, now: float) -> float:
        """Until the oldest request ends, as it seems."""
        if not self.durations:
            return _UNKNOWN_PLACE_SECONDS
        return max(max(self.durations) - (now - self.running[0]), _MIN_PLACE_SECONDS)


class Allowance:
    """One request's share of its key's limits, from `KeyLimits.enter` to `leave`."""

    def __init__(self, use: _KeyUse, clock: Callable[[], float]) -> None:
        self._use = use
        self._clock = clock
        self._began = clock()
        self._reserved_tokens = 0
        use.running.append(self._began)

    def reserve_tokens(self, num_tokens: int) -> None:
        """The prompt, and the most that may follow; in place of what was reserved before. Raises
        RateLimited; the request itself does not count then."""
        bucket = self._use.tokens
        if bucket is None:
            return
        now = self._clock()
        bucket.give_back(self._reserved_tokens, now)
        self._reserved_tokens = 0
        wait_seconds = bucket.seconds_until(num_tokens, now)
        if wait_seconds > 0:
            if self._use.requests is not None:
                self._use.requests.give_back(1, now)
            raise RateLimited(
                f"this key's tokens of the minute are used: the request needs {num_tokens}"
                f" (its prompt and the most that it may generate), the limit is"
                f" {self._use.limits.tokens_per_minute} a minute",
                wait_seconds,
            )
        bucket.take(num_tokens, now)
        self._reserved_tokens = num_tokens

    def leave(self, used_tokens: int) -> None:
        """At the end of the request, whatever became of it. Once."""
        now = self._clock()
        self._use.running.remove(self._began)
        self._use.durations.append(now - self._began)
        if self._use.tokens is not None:
            self._use.tokens.give_back(self._reserved_tokens - used_tokens, now)


class KeyLimits:
    """Every key's use, by its id: a key that changes its limits keeps what it has used."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._uses: dict[str, _KeyUse] = {}

    def quotas(self, key_id: str) -> dict[str, Quota]:
        """By what is counted, as far as there is a limit: requests, tokens."""
        use = self._uses.get(key_id)
        return {} if use is None else use.quotas(self._clock())

    def enter(self, key_id: str, limits: Limits) -> Allowance:
        """Raises RateLimited, and counts nothing then."""
        use = self._uses.setdefault(key_id, _KeyUse())
        now = self._clock()
        use.set_limits(limits, now)
        most = limits.max_concurrent_requests
        if most is not None and len(use.running) >= most:
            raise RateLimited(
                f"this key has {len(use.running)} requests running; it may have {most} at once",
                use.place_seconds(now),
            )
        if use.requests is not None:
            wait_seconds = use.requests.seconds_until(1, now)
            if wait_seconds > 0:
                raise RateLimited(
                    f"this key has made its {limits.requests_per_minute} requests of the minute",
                    wait_seconds,
                )
            use.requests.take(1, now)
        return Allowance(use, self._clock)
