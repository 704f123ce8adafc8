"""How long a step takes, learnt from the steps themselves, and how much prompt one can bear.

    seconds = fixed + per_token * tokens + per_read * reads

    reads of a share   |<-- computed -->|<- share ->|    each of its tokens reads all before it:
                       computed * share + share * (share + 1) / 2

The last few steps of each size are remembered, so that a long stretch of decoding does not make
it forget what a chunk costs. A line is laid through them by least squares; steps that took far
longer than the line says (a collection of garbage, a busy neighbour) are then left out of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

_STEPS_PER_SIZE: Final = 24  # remembered for each power of two of tokens
_STEPS_BETWEEN_FITS: Final = 8
_MIN_STEPS: Final = 8  # before anything is predicted
_OUTLIER: Final = 4.0  # in median distances from the line
_RIDGE: Final = 1e-9  # of the scaled sums: keeps what was never varied at about 0


def num_reads(num_computed_tokens: int, num_scheduled_tokens: int) -> int:
    """Pairs of a scheduled token and one that it attends to."""
    return (
        num_computed_tokens * num_scheduled_tokens
        + num_scheduled_tokens * (num_scheduled_tokens + 1) // 2
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds; no part is negative."""

    fixed: float
    per_token: float
    per_read: float

    def seconds(self, num_tokens: float, reads: float) -> float:
        return self.fixed + self.added_seconds(num_tokens, reads)

    def added_seconds(self, num_tokens: float, reads: float) -> float:
        """What they add to a step that is made anyway."""
        return self.per_token * num_tokens + self.per_read * reads

    def tokens_within(self, seconds: float, num_computed_tokens: int) -> float:
        """The longest share after that many computed tokens which adds at most `seconds`."""
        if seconds <= 0:
            return 0.0
        linear = self.per_token + self.per_read * (num_computed_tokens + 0.5)
        quadratic = self.per_read / 2
        if linear <= 0:
            return math.inf
        # quadratic n^2 + linear n = seconds, in the form that also holds for a tiny quadratic
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * quadratic * seconds))


_Step = tuple[float, float, float]  # (tokens, reads, seconds)


class StepTimeModel:
    def __init__(self) -> None:
        self._steps: dict[int, deque[_Step]] = {}  # by size: the bits of the number of tokens
        self._num_observed = 0
        self.step_time: StepTime | None = None  # None: too little is known

    def observe(self, num_tokens: int, reads: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        steps = self._steps.setdefault(size, deque(maxlen=_STEPS_PER_SIZE))
        steps.append((num_tokens, reads, seconds))
        self._num_observed += 1
        if self._num_observed >= _MIN_STEPS and self._num_observed % _STEPS_BETWEEN_FITS == 0:
            self.step_time = _robust_fit([step for steps in self._steps.values() for step in steps])


def _robust_fit(steps: Sequence[_Step]) -> StepTime:
    fitted = _fit(_without_slow_ones(steps))
    distances = [abs(fitted.seconds(tokens, reads) - took) for tokens, reads, took in steps]
    # Below the clock's own noise nobody is an outlier.
    limit = _OUTLIER * max(median(distances), 1e-6)
    near = [step for step, distance in zip(steps, distances, strict=True) if distance <= limit]
    return _fit(near)


def _without_slow_ones(steps: Sequence[_Step]) -> list[_Step]:
    """A first, coarse sieve, since one stall of a second would tilt the line that judges it."""
    seconds_per_size: dict[int, list[float]] = {}
    for tokens, _, seconds in steps:
        seconds_per_size.setdefault(int(tokens).bit_length(), []).append(seconds)
    usual = {size: median(seconds) for size, seconds in seconds_per_size.items()}
    return [step for step in steps if step[2] <= 3 * usual[int(step[0]).bit_length()]]


def _fit(steps: Sequence[_Step]) -> StepTime:
    """Least squares with no negative part: what would be negative is left out."""
    columns = [[1.0] * len(steps), [s[0] for s in steps], [s[1] for s in steps]]
    seconds = [step[2] for step in steps]
    used = [0, 1, 2]
    while True:
        parts = _solve([columns[i] for i in used], seconds)
        worst = min(range(len(parts)), key=parts.__getitem__)
        if parts[worst] >= 0 or len(used) == 1:
            break
        del used[worst]
    values = [0.0, 0.0, 0.0]
    for i, part in zip(used, parts, strict=True):
        values[i] = max(part, 0.0)
    return StepTime(*values)


def _solve(columns: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The normal equations of up to three columns, scaled to unit length, by elimination."""
    size = len(columns)
    scales = [math.sqrt(sum(v * v for v in column)) or 1.0 for column in columns]
    rows = [
        [_dot(columns[i], columns[j]) / (scales[i] * scales[j]) for j in range(size)]
        + [_dot(columns[i], target) / scales[i]]
        for i in range(size)
    ]
    for i in range(size):
        rows[i][i] += _RIDGE
    for i in range(size):  # positive definite: no pivoting needed
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [below - factor * row for below, row in zip(rows[k], rows[i], strict=True)]
    parts = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * parts[j] for j in range(i + 1, size))
        parts[i] = (rows[i][size] - known) / rows[i][i]
    return [part / scale for part, scale in zip(parts, scales, strict=True)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
