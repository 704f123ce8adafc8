"""A context-free grammar of JSON texts: its rules, and how they are written for the compiler.

Every rule is a list of alternatives, every alternative a sequence. Repeats are rules that end in
a rule again: of all forms the compiler offers, the one whose token masks are cheap at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine_service.json_schema import chars
from engine_service.json_schema.chars import CharSet


@dataclass(frozen=True, slots=True)
class Rule:
    """Stands for what a rule allows."""

    name: str


Symbol = str | CharSet | Rule  # a text as it is, one character of a set, a rule
Sequence = tuple[Symbol, ...]

_PLAIN: Final = frozenset(map(chr, range(0x20, 0x7F))) - frozenset('"\\')
_PLAIN_IN_CLASS: Final = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Grammar:
    """Rules by name; the first that is added is the root."""

    def __init__(self) -> None:
        self._rules: dict[str, list[Sequence]] = {}

    @property
    def size(self) -> int:
        """Rules."""
        return len(self._rules)

    def reserve(self) -> Rule:
        """A rule whose alternatives come later."""
        name = "root" if not self._rules else f"r{len(self._rules)}"
        self._rules[name] = []
        return Rule(name)

    def define(self, rule: Rule, alternatives: list[Sequence]) -> None:
        self._rules[rule.name] = alternatives

    def alternatives(self, rule: Rule) -> list[Sequence]:
        return self._rules[rule.name]

    def add(self, alternatives: list[Sequence]) -> Rule:
        rule = self.reserve()
        self.define(rule, alternatives)
        return rule

    def text(self) -> str | None:
        """As the compiler reads it; None: no text comes to an end.

        Left out is what never ends, such as an object that must hold another of its own kind.
        """
        ending = self._ending()
        if "root" not in ending:
            return None
        lines = []
        for name in self._reachable(ending):
            alternatives = [
                " ".join(_written(symbol) for symbol in sequence) or '""'
                for sequence in self._rules[name]
                if _ends(sequence, ending)
            ]
            lines.append(f"{name} ::= {' | '.join(dict.fromkeys(alternatives))}\n")
        return "".join(lines)

    def _ending(self) -> set[str]:
        """Rules from which some text comes to an end."""
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, alternatives in self._rules.items():
            for used in {used for sequence in alternatives for used in _rules(sequence)}:
                users[used].append(name)
        ending: set[str] = set()
        pending = list(self._rules)
        while pending:
            name = pending.pop()
            if name in ending or not any(_ends(s, ending) for s in self._rules[name]):
                continue
            ending.add(name)
            pending += users[name]
        return ending

    def _reachable(self, ending: set[str]) -> dict[str, None]:
        found: dict[str, None] = {"root": None}
        pending = ["root"]
        while pending:
            for sequence in self._rules[pending.pop()]:
                if not _ends(sequence, ending):
                    continue
                for name in _rules(sequence):
                    if name not in found:
                        found[name] = None
                        pending.append(name)
        return found


def _rules(sequence: Sequence) -> Iterator[str]:
    return (symbol.name for symbol in sequence if isinstance(symbol, Rule))


def _ends(sequence: Sequence, ending: set[str]) -> bool:
    return all(name in ending for name in _rules(sequence))


def _written(symbol: Symbol) -> str:
    if isinstance(symbol, Rule):
        return symbol.name
    if isinstance(symbol, str):
        return '"' + "".join(c if c in _PLAIN else _escaped(ord(c)) for c in symbol) + '"'
    return "[" + "".join(map(_range, symbol)) + "]"


def _range(bounds: tuple[int, int]) -> str:
    first, last = (chr(code) if chr(code) in _PLAIN_IN_CLASS else _escaped(code) for code in bounds)
    return first if bounds[0] == bounds[1] else f"{first}-{last}"


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def json_character(label: CharSet) -> list[Sequence]:
    """How a character of the set may be written in a JSON string, as alternatives.

    Control characters that have no short escape are left out where the set has others.
    """
    raw = chars.intersection(label, _RAW)
    short = [
        escape
        for char, escape in _SHORT_ESCAPES.items()
        if chars.intersection(label, chars.of(char))
    ]
    found: list[Sequence] = [(raw,)] if raw else []
    if short:
        found.append(("\\", chars.of("".join(short))))
    if not found:
        found = [(f"\\u{code:04x}",) for first, last in label for code in range(first, last + 1)]
    return found


_SHORT_ESCAPES: Final = {
    '"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t",
}  # fmt: skip
_RAW: Final = chars.intersection(chars.complement(chars.of('"\\')), chars.complement(((0, 0x1F),)))
