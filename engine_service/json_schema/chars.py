"""Sets of characters, as sorted ranges of code points that do not touch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

CharSet = tuple[tuple[int, int], ...]  # first and last of each range, both in the set

# A text holds no halves of surrogate pairs.
ANY: Final[CharSet] = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_BEYOND: Final = 0x110000


def of(characters: str) -> CharSet:
    return union([((ord(char), ord(char)),) for char in characters])


def between(first: int, last: int) -> CharSet:
    return intersection(((first, last),), ANY)


def union(sets: Iterable[CharSet]) -> CharSet:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(bounds for chars in sets for bounds in chars):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(chars: CharSet) -> CharSet:
    gaps: list[tuple[int, int]] = []
    start = 0
    for first, last in chars:
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= 0x10FFFF:
        gaps.append((start, 0x10FFFF))
    return intersection(tuple(gaps), ANY)


def intersection(one: CharSet, other: CharSet) -> CharSet:
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            common.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def contains(chars: CharSet, code: int) -> bool:
    at = bisect_right(chars, (code, _BEYOND)) - 1
    return at >= 0 and code <= chars[at][1]


def size(chars: CharSet) -> int:
    return sum(last - first + 1 for first, last in chars)
