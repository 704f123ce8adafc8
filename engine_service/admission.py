"""The door: how much may wait for its first step, and when a refused caller should come again.

What is counted are samples (a request for n counts as n) and their prompt tokens, from admission
to their first step. A request is refused if there is no room for it, or if those before it are
predicted to leave too late for it:

    predicted wait = samples that wait / drain rate

The drain rate is measured by a clock that runs only while something waits, so an idle hour says
nothing about how fast a queue drains. With nothing waiting, nobody is refused, so a pessimistic
measurement is always corrected by the next request. The prediction is for the end of the queue:
whom priority or fair share would take sooner may be refused too early.

The hint of a refusal is the time in which enough samples leave for the same request to be let in
behind those that were told so before (`promised_returns.py`). It is taken from the slower of two
rates: that of all who leave, and that of those who took the place of one that ended. For at the
start of a rush many leave at once, for places that were free, and say nothing of what comes next.
A tenth more and one sample allow for what no rate foretells; and who says that it comes again is
let in beyond the limits, by a quarter for each refusal before it, up to twice the limits: so a
promise is kept if it can be, and who was put off twice goes before who was put off once.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from engine_service.errors import QueueFull, WaitTooLong
from engine_service.promised_returns import PromisedReturns, with_margin

_WINDOW_SECONDS: Final = 30.0
_MIN_RETRY_SECONDS: Final = 0.25
_MAX_RETRY_SECONDS: Final = 60.0
_UNKNOWN_RETRY_SECONDS: Final = 1.0  # nothing drained yet
_UNKNOWN_SECONDS_EACH: Final = 0.25
_BEYOND_EACH_REFUSAL: Final = 0.25  # of the limits
_MOST_BEYOND: Final = 1.0


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
        self._elapsed_seconds = self.elapsed_seconds(now_seconds)
        self._running_since = now_seconds if is_queueing else None

    def departed(self, now_seconds: float) -> None:
        self._departures.append(self.elapsed_seconds(now_seconds))

    def seconds_for(self, num_samples: float, now_seconds: float) -> float | None:
        """Until that many have left; None: nothing was measured yet.

        Time without a departure counts: a queue that stands still becomes slower by the second.
        """
        clock = self.elapsed_seconds(now_seconds)
        while self._departures and self._departures[0] <= clock - _WINDOW_SECONDS:
            self._departures.popleft()
        window = min(clock, _WINDOW_SECONDS)
        if self._departures:
            return num_samples * window / len(self._departures)
        return num_samples * window if clock > _WINDOW_SECONDS else None

    def elapsed_seconds(self, now_seconds: float) -> float:
        """Of queueing, ever."""
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
        self._turnover = DrainRate()  # of those that took the place of one that ended
        self._promised = PromisedReturns()
        self._num_freed_places = 0  # by samples that ended while others waited, not yet taken
        self.num_queued_samples = 0
        self.num_queued_tokens = 0

    def enter(
        self,
        num_samples: int,
        tokens_each: int,
        now_seconds: float,
        patience_seconds: float = math.inf,
        attempt: int | None = None,
    ) -> None:
        """`patience_seconds`: after that the request is of no use to its caller. `attempt`: 1 for
        the first, 2 after one refusal; None: not known, and told from the time.

        Raises QueueFull (or WaitTooLong, one kind of it), which tells when to come.
        One request alone may exceed the token limit: else it could never be served.
        """
        if self.num_queued_samples:
            self._check_room(num_samples, num_samples * tokens_each, now_seconds, attempt)
            max_wait_seconds = min(self._max_wait_seconds, patience_seconds)
            self._check_wait(num_samples, max_wait_seconds, now_seconds)
        else:
            self._promised.clear()  # nobody has to wait for anybody
        self.num_queued_samples += num_samples
        self.num_queued_tokens += num_samples * tokens_each
        self._update_clock(now_seconds)

    def leave(self, tokens: int, now_seconds: float, *, scheduled: bool) -> None:
        """One sample no longer waits; `scheduled`: for its first step, not aborted."""
        if scheduled:
            self._drain_rate.departed(now_seconds)
            if self._num_freed_places:
                self._num_freed_places -= 1
                self._turnover.departed(now_seconds)
        self.num_queued_samples -= 1
        self.num_queued_tokens -= tokens
        self._update_clock(now_seconds)

    def freed(self) -> None:
        """One sample that ran has ended, and another may take its place."""
        if self.num_queued_samples:
            self._num_freed_places += 1

    def reset(self, now_seconds: float) -> None:
        """The core died, and the queue with it."""
        self.num_queued_samples = 0
        self.num_queued_tokens = 0
        self._promised.clear()
        self._update_clock(now_seconds)

    # ------------------------------------------------------------ inside

    def _update_clock(self, now_seconds: float) -> None:
        is_queueing = self.num_queued_samples > 0
        self._drain_rate.queueing(is_queueing, now_seconds)
        self._turnover.queueing(is_queueing, now_seconds)
        if not is_queueing:
            self._num_freed_places = 0

    def _comes_as_told(self, attempt: int | None, now_seconds: float) -> bool:
        """Whether it is one of those that were told when to come; its promise is used up then."""
        promised = self._promised
        promised.forget_late(now_seconds)
        comes_again = promised.is_due(now_seconds) if attempt is None else attempt > 1
        if comes_again and promised.num_samples:
            promised.keep()
            return True
        return False

    def _check_room(
        self, num_samples: int, num_tokens: int, now_seconds: float, attempt: int | None
    ) -> None:
        comes_as_told = self._comes_as_told(attempt, now_seconds)
        num_refusals = 0 if attempt is None else attempt - 1  # also of a forgotten promise
        beyond = min(num_refusals * _BEYOND_EACH_REFUSAL, _MOST_BEYOND)
        overflow = self._overflow(num_samples, num_tokens, beyond)
        if overflow <= 0 and not comes_as_told and not self._leaves_room(num_samples, now_seconds):
            overflow = 1
        if overflow > 0:
            raise self._queue_full(num_samples, overflow, now_seconds)

    def _queue_full(self, num_samples: int, overflow: int, now_seconds: float) -> QueueFull:
        return QueueFull(
            f"the queue is full: {self.num_queued_samples} samples with"
            f" {self.num_queued_tokens} prompt tokens wait, and"
            f" {self._promised.num_samples} more were told when to come",
            retry_after_seconds=self._promise(num_samples, overflow, now_seconds),
        )

    def _overflow(self, num_samples: int, num_tokens: int, beyond: float) -> int:
        """How many of those that wait must leave first; `beyond`: a share of the limits."""
        overflow = self.num_queued_samples + num_samples - int(self._max_samples * (1 + beyond))
        if overflow > 0:
            return overflow
        too_many_tokens = self.num_queued_tokens + num_tokens - int(self._max_tokens * (1 + beyond))
        tokens_each = self.num_queued_tokens / self.num_queued_samples  # of those that wait
        return math.ceil(min(too_many_tokens / tokens_each, self.num_queued_samples))

    def _leaves_room(self, num_samples: int, now_seconds: float) -> bool:
        """For those that were told when to come."""
        seconds_each = self._turnover.seconds_for(1, now_seconds)
        if seconds_each is None:
            return True
        num_waiting = self.num_queued_samples + num_samples
        return self._promised.would_find_room(
            num_waiting, self._max_samples, seconds_each, now_seconds
        )

    def _check_wait(self, num_samples: int, max_wait_seconds: float, now_seconds: float) -> None:
        wait_seconds = self._drain_rate.seconds_for(self.num_queued_samples, now_seconds)
        if wait_seconds is not None and wait_seconds > max_wait_seconds:
            seconds_each = wait_seconds / self.num_queued_samples
            overflow = math.ceil((wait_seconds - max_wait_seconds) / seconds_each)
            raise WaitTooLong(
                f"{self.num_queued_samples} samples wait, for {wait_seconds:.1f} s as it seems:"
                f" longer than the {max_wait_seconds:.1f} s that this request may wait",
                retry_after_seconds=self._promise(num_samples, overflow, now_seconds),
            )

    def _promise(self, num_samples: int, overflow: int, now_seconds: float) -> float:
        """When to come, in seconds from now: behind all that were told before."""
        ahead = with_margin(overflow + self._promised.num_samples)
        seconds = self._turnover.seconds_for(ahead, now_seconds)
        if seconds is None:
            standing_seconds = self._turnover.elapsed_seconds(now_seconds)
            first = max(_UNKNOWN_RETRY_SECONDS, standing_seconds)
            seconds = first + self._promised.num_samples * _UNKNOWN_SECONDS_EACH
        seconds = max(seconds, self._drain_rate.seconds_for(ahead, now_seconds) or 0.0)
        # On top of the least, so that those told one after the other don't come together.
        hint = min(_MIN_RETRY_SECONDS + seconds, _MAX_RETRY_SECONDS)
        self._promised.promise(now_seconds + hint, num_samples)
        return hint
