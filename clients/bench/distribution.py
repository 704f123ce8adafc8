"""How measured values are spread: percentiles, interpolated between neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Distribution:
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None for no values: there is nothing to say then, least of all 0."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        mean = sum(ordered) / len(ordered)
        return cls(p50, p90, p95, p99, ordered[-1], mean, len(ordered))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of at least one value, in ascending order: rank (n - 1) * percent / 100, linear between."""
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
