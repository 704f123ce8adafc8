"""How long a document's grammar will compile, told before it is compiled.

What costs is every state of a string at which many tokens begin well: the compiler tries them
there, and those of letters after a space most of all. A unit is about 15 ms of one processor,
measured with a vocabulary of 49,152: any character costs one, a small letter or a digit 0.15.
"""

from __future__ import annotations

import string
from typing import Final

from engine_service.json_schema import chars
from engine_service.json_schema.automata import Automaton
from engine_service.schema_error import refused

MAX_UNITS: Final = 300.0
MAX_RULES: Final = 20_000
_LETTERS: Final = chars.of(string.ascii_letters)
_SPACE: Final = chars.of(" ")
_LEAST_UNITS: Final = 0.01
_LETTERS_UNITS: Final = 0.3
_AFTER_SPACE: Final = 3.0


class Cost:
    """Of one document, part by part; refuses the one that makes it too much."""

    def __init__(self) -> None:
        self._units = 0.0

    def add_automaton(self, path: str, automaton: Automaton) -> None:
        """Of a string."""
        self._spend(path, automaton_units(automaton))

    def add_lengths(self, path: str, count: int) -> None:
        """Of a string of any characters: states that no other string has."""
        self._spend(path, float(count))

    def add_rules(self, path: str, total: int) -> None:
        """`total`: of the grammar so far."""
        if total > MAX_RULES:
            raise refused(path, "the schema up to here makes too large a grammar")

    def _spend(self, path: str, units: float) -> None:
        self._units += units
        if self._units > MAX_UNITS:
            raise refused(path, "lengths and patterns up to here take too long to compile")


def automaton_units(automaton: Automaton) -> float:
    return sum(_units(edges) for edges in automaton.edges)


def _units(edges: tuple[tuple[chars.CharSet, int], ...]) -> float:
    """Of one state."""
    any_of = chars.union([label for label, _ in edges])
    share = chars.size(chars.intersection(any_of, _LETTERS)) / chars.size(_LETTERS)
    has_space = bool(chars.intersection(any_of, _SPACE))
    return _LEAST_UNITS + share * _LETTERS_UNITS * (_AFTER_SPACE if has_space else 1.0)
