"""How long a regular expression's grammar will compile, told before it is compiled.

What costs is every state at which a wide class of characters may come next: the compiler tries
the whole vocabulary there. Those of bounded repeats are unrolled. A unit is about 10 ms of one
processor, measured with a vocabulary of 49,152:

    class{a,b}      b / 2             a class or a dot; a literal is a tenth of it
    (...){a,b}      b times what is inside, 12 times that if its length varies
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_service.schema_error import refused

MAX_UNITS: Final = 250.0
_CLASS_UNITS: Final = 0.5
_LITERAL_UNITS: Final = 0.05
_VARYING: Final = 12.0
_CLASS_ESCAPES: Final = "wWdDsS"


def check_cost(place: str, pattern: str) -> None:
    """Raises InvalidRequest for what is too much, and for anchors inside: they are ignored.

    `pattern`: one that Python's `re` has taken.
    """
    if _PatternScan(place, pattern).units() > MAX_UNITS:
        raise refused(place, "takes too long to compile")


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a pattern."""

    units: float
    varies: bool  # in length


class _PatternScan:
    """Recursive descent over a regular expression that Python's `re` has taken."""

    def __init__(self, place: str, pattern: str) -> None:
        self._place = place
        self._pattern = pattern
        self._at = 0

    def units(self) -> float:
        return self._alternatives().units

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        self._at += 1
        return char

    def _alternatives(self) -> _Part:
        units, varies = 0.0, False
        while (char := self._peek()) and char != ")":
            if char == "|":
                self._at += 1
                varies = True
                continue
            part = self._repeated(self._atom())
            units += part.units
            varies = varies or part.varies
        return _Part(units, varies)

    def _atom(self) -> _Part:
        start, char = self._at, self._take()
        if char == "(":
            self._at += 2 if self._pattern.startswith("?:", self._at) else 0
            part = self._alternatives()
            self._at += 1  # the closing parenthesis
            return part
        if char == "[":
            self._skip_class()
            return _Part(_CLASS_UNITS, False)
        if char == "\\":
            escaped = self._take()
            if escaped in "AZbB":
                raise refused(self._place, f"\\{escaped} is not enforced")
            return _Part(_CLASS_UNITS if escaped in _CLASS_ESCAPES else _LITERAL_UNITS, False)
        if char in "^$":
            if start != (0 if char == "^" else len(self._pattern) - 1):
                raise refused(self._place, f"{char} is enforced at the pattern's end only")
            return _Part(0.0, False)
        return _Part(_CLASS_UNITS if char == "." else _LITERAL_UNITS, False)

    def _skip_class(self) -> None:
        self._at += 1 if self._peek() == "^" else 0
        self._at += 1 if self._peek() == "]" else 0
        while (char := self._take()) and char != "]":
            self._at += 1 if char == "\\" else 0

    def _repeated(self, part: _Part) -> _Part:
        while (char := self._peek()) and char in "*+?{":
            low, high = 0, None
            if char == "{":
                end = self._pattern.find("}", self._at)
                bounds = self._pattern[self._at + 1 : end].split(",")
                if end < 0 or not all(bound.isdecimal() or not bound for bound in bounds):
                    break  # a brace that stands for itself
                low = int(bounds[0] or 0)
                high = int(bounds[-1]) if bounds[-1] else None
                self._at = end + 1
                count = max(high if high is not None else low, 1)
                factor = _VARYING if part.varies and count > 1 else 1.0
                part = _Part(part.units * count * factor, part.varies or low != high)
            else:
                self._at += 1
                part = _Part(part.units, True)
        return part
