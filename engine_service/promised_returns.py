"""Those that were refused and told when to come back: their places are kept, and never sold twice.

Told the same time, all would come back together and most be refused again. So each is told a time
behind those before it, one drained sample after the other, as if the queue went on outside the
door. Who comes again after a refusal is taken for the one that was to come first: callers have no
name here. Of those that don't say whether they do, who comes when one is due is taken for that one.
All others are new, and may not take a place that will be needed by then.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

_LATE_SECONDS: Final = 2.0  # a place is kept for so long beyond its time
_MAX_RETURNS: Final = 4096  # that are kept in mind; far beyond any queue


def with_margin(num_samples: int) -> float:
    """As many as should have left before one may rely on that many having done so."""
    return num_samples * 1.1 + 1


@dataclass(frozen=True, slots=True, order=True)
class _Return:
    due_seconds: float
    num_samples: int


class PromisedReturns:
    """All times are seconds of one clock, which never goes back."""

    def __init__(self) -> None:
        self._returns: list[_Return] = []  # the earliest first
        self.num_samples = 0

    def forget_late(self, now_seconds: float) -> None:
        while self._returns and self._returns[0].due_seconds < now_seconds - _LATE_SECONDS:
            self.num_samples -= self._returns.pop(0).num_samples

    def is_due(self, now_seconds: float) -> bool:
        return bool(self._returns) and self._returns[0].due_seconds <= now_seconds

    def keep(self) -> None:
        """The earliest has come."""
        self.num_samples -= self._returns.pop(0).num_samples

    def promise(self, due_seconds: float, num_samples: int) -> None:
        if len(self._returns) < _MAX_RETURNS:
            bisect.insort(self._returns, _Return(due_seconds, num_samples))
            self.num_samples += num_samples

    def clear(self) -> None:
        self._returns.clear()
        self.num_samples = 0

    def would_find_room(
        self, num_waiting: int, max_waiting: int, seconds_each: float, now_seconds: float
    ) -> bool:
        """Whether each could be let in at its time, if that many wait now and one leaves every
        `seconds_each`."""
        for promised in self._returns:
            num_waiting += promised.num_samples
            must_leave = num_waiting - max_waiting
            seconds = with_margin(must_leave) * seconds_each
            if must_leave > 0 and seconds > promised.due_seconds - now_seconds:
                return False
        return True
