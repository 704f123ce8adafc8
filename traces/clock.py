"""Wall-clock stamps for what was measured on the monotonic clock.

The offset is taken once per process, so that spans of one process keep their monotonic distances
whatever happens to the wall clock.
"""

from __future__ import annotations

import time
from typing import Final


def _measure_offset_ns() -> int:
    """time.time_ns() - time.monotonic_ns(), of the tightest of three bracketed readings."""
    readings = []
    for _ in range(3):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


_OFFSET_NS: Final = _measure_offset_ns()


def unix_ns(monotonic_ns: int) -> int:
    """Nanoseconds since the epoch for a stamp of time.monotonic_ns()."""
    return monotonic_ns + _OFFSET_NS


def now_unix_ns() -> int:
    """The time as the spans of this process tell it."""
    return time.monotonic_ns() + _OFFSET_NS
