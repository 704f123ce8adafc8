"""Numbers within bounds, as grammar rules that read them digit by digit.

A number is written in one way: no leading zeros, no "-0", an exponent only where nothing is asked
of the value. Numbers that are not whole have at most 15 digits and whole ones no more than that or
than their bounds: so every reader, with floats of 64 bits too, gets the value that is written, and
the comparisons made here on digits hold for that value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from engine_service.json_schema.chars import CharSet
from engine_service.json_schema.grammar import Grammar, Rule, Sequence

MAX_DIGITS: Final = 15
MAX_MULTIPLE: Final = 1024  # of the smallest decimal step that the multiples need
_FRACTION_DIGITS: Final = 6  # where the bounds need no more
_SMALL_STEP: Final = 100  # larger ones have so many remainders that numbers stay short

# How a text so far compares with a bound: below it, equal to its first digits, above it.
_BELOW, _EQUAL, _ABOVE = -1, 0, 1


@dataclass(frozen=True, slots=True)
class Bound:
    value: Decimal
    strict: bool = False  # the value itself is outside


@dataclass(frozen=True, slots=True)
class NumberRange:
    integer: bool
    low: Bound | None = None
    high: Bound | None = None
    multiple: Fraction | None = None  # one whose denominator is a power of two

    def contains(self, value: int | float) -> bool:
        exact = Fraction(repr(value))
        if self.integer and exact.denominator != 1:
            return False
        if self.low is not None and not _inside(exact, self.low, _ABOVE):
            return False
        if self.high is not None and not _inside(exact, self.high, _BELOW):
            return False
        return self.multiple is None or (exact / self.multiple).denominator == 1


def _inside(value: Fraction, bound: Bound, side: int) -> bool:
    edge = Fraction(bound.value)
    if value == edge:
        return not bound.strict
    return (value > edge) == (side == _ABOVE)


def step_of(multiple: Fraction) -> int | None:
    """The multiple in units of the last decimal place it needs; None: there is none.

    Floats compute multiples exactly only where the denominator is a power of two.
    """
    places = multiple.denominator.bit_length() - 1
    if multiple.denominator != 1 << places:
        return None
    return int(multiple * 10**places)


def add_number(grammar: Grammar, numbers: NumberRange) -> Rule:
    """A rule without any text where no number fits."""
    zero = Bound(Decimal(0))
    low = numbers.low if numbers.low is not None and numbers.low.value >= 0 else zero
    alternatives: list[Sequence] = []
    if numbers.high is None or numbers.high.value >= 0:
        alternatives.append((_add_magnitudes(grammar, numbers, low, numbers.high),))
    if numbers.low is None or numbers.low.value < 0:
        nearest = Bound(Decimal(0), strict=True)
        if numbers.high is not None and numbers.high.value < 0:
            nearest = Bound(-numbers.high.value, numbers.high.strict)
        farthest = numbers.low and Bound(-numbers.low.value, numbers.low.strict)
        alternatives.append(("-", _add_magnitudes(grammar, numbers, nearest, farthest)))
    return grammar.add(alternatives)


@dataclass(frozen=True, slots=True)
class _Edge:
    """A bound of at least 0, by its digits."""

    whole: str
    fraction: str
    strict: bool

    def compared(self, so_far: int, digit: int, at: int, *, in_fraction: bool) -> int:
        """`at`: which digit of its part this is, from 0."""
        digits = self.fraction if in_fraction else self.whole
        own = int(digits[at]) if at < len(digits) else 0
        if so_far != _EQUAL or digit == own:
            return so_far
        return _ABOVE if digit > own else _BELOW

    def of_whole(self, so_far: int, length: int) -> int:
        """Once all digits before the point are read."""
        if length != len(self.whole):
            return _ABOVE if length > len(self.whole) else _BELOW
        return so_far

    def of_all(self, so_far: int, fraction_length: int) -> int:
        """Once all digits are read."""
        if so_far == _EQUAL and self.fraction[fraction_length:].strip("0"):
            return _BELOW
        return so_far


class _State(NamedTuple):
    place: str  # start, whole, point, fraction, mark, sign, exponent, exponent end
    length: int = 0  # digits read of this place; 0 before the first, and once it cannot matter
    to_low: int = _EQUAL
    to_high: int = _EQUAL
    remainder: int = 0
    zero: bool = False  # the whole part is 0: no digit may follow


class _Magnitudes:
    """The deterministic automaton of numbers of at least 0."""

    def __init__(self, numbers: NumberRange, low: Bound, high: Bound | None) -> None:
        self._low = _edge(low)
        self._high = _edge(high) if high is not None else None
        self._step = None if numbers.multiple is None else step_of(numbers.multiple)
        places = 0 if numbers.multiple is None else numbers.multiple.denominator.bit_length() - 1
        self._places = places
        given = [edge for edge in (self._low, self._high) if edge is not None]
        longest = max(len(edge.whole) for edge in given)
        self._max_whole = max(MAX_DIGITS, longest) if numbers.integer else MAX_DIGITS
        if self._step is not None and self._step > _SMALL_STEP:
            self._max_whole = max(longest, len(str(self._step)) + 1)
        if self._high is not None:
            self._max_whole = min(self._max_whole, len(self._high.whole))
        if numbers.integer or self._step is not None:
            self._max_fraction = 0 if numbers.integer else places
        else:
            precise = max(len(edge.fraction) for edge in given)
            self._max_fraction = min(max(_FRACTION_DIGITS, precise), MAX_DIGITS - 1)
        self._free = numbers == NumberRange(integer=False)

    def following(self, state: _State) -> Iterator[tuple[str, _State]]:
        """The characters that may come next, and where they lead."""
        if state.place in ("start", "whole"):
            yield from self._whole(state)
        if state.place in ("point", "fraction") and state.length < self._max_fraction:
            for digit in range(10):
                yield str(digit), self._fraction_digit(state, digit)
        if self._free:
            yield from _exponent(state)

    def accepts(self, state: _State) -> bool:
        if state.place == "exponent":
            return True
        if state.place not in ("whole", "fraction"):
            return False
        length = state.length if state.place == "fraction" else 0
        state = self._at_point(state) if state.place == "whole" else state
        to_low = self._low.of_all(state.to_low, length)
        if to_low == _BELOW or (to_low == _EQUAL and self._low.strict):
            return False
        if self._high is not None:
            to_high = self._high.of_all(state.to_high, length)
            if to_high == _ABOVE or (to_high == _EQUAL and self._high.strict):
                return False
        if self._step is None:
            return True
        scale = int(10 ** (self._places - length))
        return state.remainder * scale % self._step == 0

    def _whole(self, state: _State) -> Iterator[tuple[str, _State]]:
        if state.place == "whole" and self._max_fraction and self._leaves_fraction(state):
            yield ".", self._at_point(state)
        if state.zero or state.length >= self._max_whole:
            return
        for digit in range(10):
            yield str(digit), self._whole_digit(state, digit)

    def _leaves_fraction(self, state: _State) -> bool:
        return state.length <= MAX_DIGITS - self._max_fraction

    def _whole_digit(self, state: _State, digit: int) -> _State:
        length = state.length + 1
        to_low = self._low.compared(state.to_low, digit, state.length, in_fraction=False)
        to_high = _BELOW
        if self._high is not None:
            to_high = self._high.compared(state.to_high, digit, state.length, in_fraction=False)
        return _State(
            "whole", length, to_low, to_high, self._reduced(state, digit), state.length + digit == 0
        )

    def _at_point(self, state: _State) -> _State:
        to_low = self._low.of_whole(state.to_low, state.length)
        to_high = _BELOW
        if self._high is not None:
            to_high = self._high.of_whole(state.to_high, state.length)
        return _State("point", 0, to_low, to_high, state.remainder)

    def _fraction_digit(self, state: _State, digit: int) -> _State:
        at = state.length
        to_low = self._low.compared(state.to_low, digit, at, in_fraction=True)
        to_high = _BELOW
        if self._high is not None:
            to_high = self._high.compared(state.to_high, digit, at, in_fraction=True)
        return _State("fraction", at + 1, to_low, to_high, self._reduced(state, digit))

    def _reduced(self, state: _State, digit: int) -> int:
        if self._step is None:
            return 0
        return (state.remainder * 10 + digit) % self._step


def _exponent(state: _State) -> Iterator[tuple[str, _State]]:
    """Of one or two digits, so that no value leaves the range of floats."""
    if state.place in ("whole", "fraction"):
        yield from ((mark, _State("mark")) for mark in "eE")
    elif state.place in ("mark", "sign"):
        if state.place == "mark":
            yield from ((sign, _State("sign")) for sign in "+-")
        yield from ((str(digit), _State("exponent", 1)) for digit in range(10))
    elif state.place == "exponent" and state.length == 1:
        yield from ((str(digit), _State("exponent", 2)) for digit in range(10))


def _add_magnitudes(grammar: Grammar, numbers: NumberRange, low: Bound, high: Bound | None) -> Rule:
    automaton = _Magnitudes(numbers, low, high)
    start = _State("start")
    rules = {start: grammar.reserve()}
    pending = [start]
    while pending:
        state = pending.pop()
        labels: dict[_State, str] = {}
        for char, target in automaton.following(state):
            labels[target] = labels.get(target, "") + char
            if target not in rules:
                rules[target] = grammar.reserve()
                pending.append(target)
        alternatives: list[Sequence] = [
            (_char_set(label), rules[target]) for target, label in labels.items()
        ]
        if automaton.accepts(state):
            alternatives.append(())
        grammar.define(rules[state], alternatives)
    return rules[start]


def _char_set(characters: str) -> CharSet:
    codes = sorted(map(ord, characters))
    ranges: list[tuple[int, int]] = []
    for code in codes:
        if ranges and ranges[-1][1] + 1 == code:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return tuple(ranges)


def _edge(bound: Bound) -> _Edge:
    whole, _, fraction = format(bound.value, "f").partition(".")
    return _Edge(whole.lstrip("0") or "0", fraction, bound.strict)
