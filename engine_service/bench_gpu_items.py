"""What a part of `bench_gpu` is made of: items, each of which yields figures or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Figures = Mapping[str, float]


class Item(NamedTuple):
    name: str
    measure: Callable[[], Figures]


class CheckFailed(Exception):
    """Figures that are not what they have to be."""
