"""Whether no value fits two schemas, as far as that can be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine_service.json_schema.automata import TooManyStates, meet
from engine_service.json_schema.numbers import NumberRange
from engine_service.json_schema.shapes import (
    Arrays,
    Circular,
    Conjunction,
    Objects,
    Shape,
    Strings,
    Values,
)
from engine_service.json_schema.values import fits_any
from engine_service.schema_error import Json

MAX_PATTERNS: Final = 50  # comparisons of one document

_MAX_STATES: Final = 500
_MAX_DEPTH: Final = 3  # of properties within properties

Alternatives = Callable[[Conjunction], Sequence[Shape]]


class Comparison:
    """Of the schemas of one document; strings by so many patterns only, then it can't be told."""

    def __init__(self, alternatives: Alternatives) -> None:
        self._alternatives = alternatives
        self._patterns_left = MAX_PATTERNS

    def are_disjoint(self, one: Conjunction, other: Conjunction, depth: int = 0) -> bool:
        """False where it can't be told."""
        try:
            ones, others = self._alternatives(one), self._alternatives(other)
        except Circular:
            return False
        return all(self._apart(a, b, depth) for a in ones for b in others)

    def _apart(self, one: Shape, other: Shape, depth: int) -> bool:
        if isinstance(one, Values):
            return not any(self._may_fit(value, other) for value in one.values)
        if isinstance(other, Values):
            return self._apart(other, one, depth)
        if isinstance(one, Strings) and isinstance(other, Strings):
            return self._strings_apart(one, other)
        if isinstance(one, NumberRange) and isinstance(other, NumberRange):
            return _all_below(one, other) or _all_below(other, one)
        if isinstance(one, Objects) and isinstance(other, Objects) and depth < _MAX_DEPTH:
            return self._objects_apart(one, other, depth)
        return type(one) is not type(other)

    def _may_fit(self, value: Json, shape: Shape) -> bool:
        """The grammar may write less than the schema allows; all of that is taken to fit."""
        match shape:
            case Strings():
                return isinstance(value, str) and meet(shape.widest_languages()).accepts(value)
            case Arrays():
                return isinstance(value, list)
            case Objects():
                return isinstance(value, dict)
        return fits_any(value, [shape], self._alternatives)

    def _strings_apart(self, one: Strings, other: Strings) -> bool:
        self._patterns_left -= 1
        if self._patterns_left < 0:
            return False
        languages = [*one.widest_languages(), *other.widest_languages()]
        try:
            return not meet(languages, _MAX_STATES).edges
        except TooManyStates:
            return False

    def _objects_apart(self, one: Objects, other: Objects, depth: int) -> bool:
        """Some property that both must hold can't have a value that fits both."""
        required = {entry.name: entry.value for entry in other.named if entry.required}
        return any(
            entry.required
            and entry.name in required
            and self.are_disjoint(entry.value, required[entry.name], depth + 1)
            for entry in one.named
        )


def _all_below(one: NumberRange, other: NumberRange) -> bool:
    if one.high is None or other.low is None:
        return False
    if one.high.value == other.low.value:
        return one.high.strict or other.low.strict
    return one.high.value < other.low.value
