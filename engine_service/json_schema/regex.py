"""Regular expressions of ECMA-262 as finite automata that search a text, anchors included.

Two readers of one schema may disagree on a few characters: whether `\\w` has letters of all
scripts, whether `.` takes a carriage return, whether `$` may stand before a last line feed. A
`narrow` automaton takes what all of them take, a `wide` one what any of them takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from engine_service.json_schema import chars
from engine_service.json_schema.chars import CharSet

MAX_CHARS: Final = 1000  # of an expression
MAX_REPEATS: Final = 1000
MAX_NESTING: Final = 50
MAX_NODES: Final = 20_000

_LINE_ENDS: Final = "\n\r\u2028\u2029"
_SPACES: Final = "\t\n\x0b\x0c\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_ONLY_PYTHON_SPACES: Final = "\x1c\x1d\x1e\x1f\x85"
_CONTROL_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX_ESCAPES: Final = {"x": 2, "u": 4}


class RegexError(ValueError):
    """Not a regular expression, or one that is not supported; the message says what."""


@dataclass(frozen=True, slots=True)
class _Chars:
    chars: CharSet


@dataclass(frozen=True, slots=True)
class _Anchor:
    kind: Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Part
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    parts: tuple[_Part, ...]


_Part = _Chars | _Anchor | _Repeat | _Sequence | _Either


@dataclass(slots=True)
class Nfa:
    """Nodes by number; 0 is the start, 1 the end. A free edge may ask for a place in the text."""

    edges: list[list[tuple[CharSet, int]]] = field(default_factory=lambda: [[], []])
    free: list[list[tuple[Literal["", "start", "end"], int]]] = field(
        default_factory=lambda: [[], []]
    )

    def closure(self, nodes: frozenset[int], start: bool, end: bool) -> frozenset[int]:
        """With what free edges lead to, at this place of the text."""
        found = set(nodes)
        pending = list(nodes)
        while pending:
            for place, target in self.free[pending.pop()]:
                open_here = place == "" or (start if place == "start" else end)
                if open_here and target not in found:
                    found.add(target)
                    pending.append(target)
        return frozenset(found)


def search_automaton(pattern: str, *, wide: bool = False) -> Nfa:
    """Of the texts in which the pattern is found somewhere. Raises RegexError."""
    if len(pattern) > MAX_CHARS:
        raise RegexError(f"has more than {MAX_CHARS} characters")
    part = _Parser(pattern, wide).parse()
    nfa = Nfa()
    before, after = _add_node(nfa), _add_node(nfa)
    nfa.free[0].append(("", before))
    nfa.edges[before].append((chars.ANY, before))
    nfa.free[after].append(("", 1))
    nfa.edges[1].append((chars.ANY, 1))
    _build(nfa, part, before, after)
    return nfa


def _add_node(nfa: Nfa) -> int:
    if len(nfa.edges) >= MAX_NODES:
        raise RegexError("repeats too much")
    nfa.edges.append([])
    nfa.free.append([])
    return len(nfa.edges) - 1


def _build(nfa: Nfa, part: _Part, start: int, end: int) -> None:
    """Adds the ways from `start` to `end` that read `part`."""
    if isinstance(part, _Chars):
        nfa.edges[start].append((part.chars, end))
    elif isinstance(part, _Anchor):
        nfa.free[start].append((part.kind, end))
    elif isinstance(part, _Either):
        for option in part.parts:
            _build(nfa, option, start, end)
    elif isinstance(part, _Sequence):
        at = start
        for step in part.parts:
            after = _add_node(nfa)
            _build(nfa, step, at, after)
            at = after
        nfa.free[at].append(("", end))
    else:
        _build_repeat(nfa, part, start, end)


def _build_repeat(nfa: Nfa, repeat: _Repeat, start: int, end: int) -> None:
    at = _add_node(nfa)
    nfa.free[start].append(("", at))
    for _ in range(repeat.low):
        after = _add_node(nfa)
        _build(nfa, repeat.part, at, after)
        at = after
    if repeat.high is None:
        loop = _add_node(nfa)
        nfa.free[at].append(("", loop))
        _build(nfa, repeat.part, loop, loop)
        nfa.free[loop].append(("", end))
        return
    for _ in range(repeat.high - repeat.low):
        nfa.free[at].append(("", end))
        after = _add_node(nfa)
        _build(nfa, repeat.part, at, after)
        at = after
    nfa.free[at].append(("", end))


class _Parser:
    """Recursive descent."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self._pattern = pattern
        self._wide = wide
        self._at = 0
        self._nesting = 0

    def parse(self) -> _Part:
        part = self._either()
        if self._at < len(self._pattern):
            raise RegexError("has a closing parenthesis too many")
        return part

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise RegexError("ends too early")
        self._at += 1
        return char

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _either(self) -> _Part:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while (char := self._peek()) and char not in "|)":
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _repeated(self) -> _Part:
        part = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return part
        if isinstance(part, _Anchor):
            raise RegexError("repeats an anchor")
        self._takes("?")  # a lazy one finds the same texts
        if self._peek() and self._peek() in "*+?":
            raise RegexError("repeats a repeat")
        low, high = bounds
        if high is not None and low > high:
            raise RegexError("has a repeat whose bounds are the wrong way round")
        if max(low, high or 0) > MAX_REPEATS:
            raise RegexError(f"repeats more than {MAX_REPEATS} times")
        return _Repeat(part, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        if self._takes("*"):
            return 0, None
        if self._takes("+"):
            return 1, None
        if self._takes("?"):
            return 0, 1
        end = self._pattern.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if not all(number.isascii() and number.isdecimal() for number in (low, high or low)):
            if comma and high.isdecimal():
                raise RegexError("has a repeat without its lower bound")
            return None  # a brace that stands for itself
        self._at = end + 1
        # Longer numbers are too many repeats in any case, and slow to read.
        least = int(low[:10])
        if not comma:
            return least, least
        return least, int(high[:10]) if high else None

    def _atom(self) -> _Part:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return _Chars(self._class())
        if char == ".":
            ends = "\n" if self._wide else _LINE_ENDS
            return _Chars(chars.complement(chars.of(ends)))
        if char == "^":
            return _Anchor("start")
        if char == "$":
            end = _Anchor("end")
            if not self._wide:
                return end
            return _Either((end, _Sequence((_Chars(chars.of("\n")), end))))
        if char == "\\":
            return _Chars(self._escape(self._wide))
        if char in "*+?":
            raise RegexError("repeats nothing")
        return _Chars(chars.of(char))

    def _group(self) -> _Part:
        if self._takes("?") and not self._takes(":"):
            raise RegexError("lookaround and named groups are not supported")
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise RegexError(f"nests deeper than {MAX_NESTING} groups")
        part = self._either()
        if not self._takes(")"):
            raise RegexError("has a group without its end")
        self._nesting -= 1
        return part

    def _class(self) -> CharSet:
        inverted = self._takes("^")
        if self._peek() == "]":
            raise RegexError("has an empty class")  # or a class of ]: readers disagree
        wide = self._wide != inverted
        members: list[CharSet] = []
        while not self._takes("]"):
            low = self._member(wide)
            if self._peek() != "-" or self._pattern[self._at + 1 : self._at + 2] in ("]", ""):
                members.append(low)
                continue
            self._at += 1
            high = self._member(wide)
            if chars.size(low) != 1 or chars.size(high) != 1 or low[0][0] > high[0][0]:
                raise RegexError("has a range without two ends in order")
            members.append(chars.between(low[0][0], high[0][0]))
        found = chars.union(members)
        return chars.complement(found) if inverted else found

    def _member(self, wide: bool) -> CharSet:
        char = self._take()
        if char != "\\":
            return chars.of(char)
        return chars.of("\b") if self._takes("b") else self._escape(wide)

    def _escape(self, wide: bool) -> CharSet:
        char = self._take()
        if char in "dws":
            return _class_escape(char, wide)
        if char in "DWS":
            return chars.complement(_class_escape(char.lower(), not wide))
        if char in _CONTROL_ESCAPES:
            return chars.of(_CONTROL_ESCAPES[char])
        if char in _HEX_ESCAPES:
            digits = self._pattern[self._at : self._at + _HEX_ESCAPES[char]]
            if len(digits) < _HEX_ESCAPES[char] or not all(d in _HEX_DIGITS for d in digits):
                raise RegexError(f"has \\{char} without its digits")
            self._at += len(digits)
            code = int(digits, 16)
            if chars.intersection(((code, code),), chars.ANY):
                return ((code, code),)
            raise RegexError("has half of a surrogate pair")
        if char.isalnum() or char == "_":
            raise RegexError(f"\\{char} is not supported")
        return chars.of(char)


_HEX_DIGITS: Final = "0123456789abcdefABCDEF"


@lru_cache(maxsize=8)
def _class_escape(letter: str, wide: bool) -> CharSet:
    if letter == "s":
        return chars.of(_SPACES + (_ONLY_PYTHON_SPACES if wide else ""))
    narrow = "0123456789"
    if letter == "w":
        narrow += "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
    if not wide:
        return chars.of(narrow)
    every = "".join(map(chr, range(0x110000)))
    found = re.finditer(rf"\{letter}+", every)
    return tuple((run.start(), run.end() - 1) for run in found)
