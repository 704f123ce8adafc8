"""What is left of a schema once everything it says of one value is met: alternatives of one kind.

A value must fit a *conjunction*: every schema that says something of it, such as a schema, what
its $ref stands for and the members of its allOf. An anyOf splits it. Each alternative that remains
is of one kind and holds, for the values beneath it, conjunctions again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from engine_service.json_schema.automata import (
    Automaton,
    Language,
    Length,
    Pattern,
    Words,
    meet,
)
from engine_service.json_schema.document import Node
from engine_service.json_schema.formats import FORMATS
from engine_service.json_schema.numbers import NumberRange
from engine_service.schema_error import Json

Conjunction = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Exactly these."""

    values: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Strings:
    low: int = 0  # characters
    high: int | None = None
    found: tuple[str, ...] = ()  # patterns, those of formats among them
    not_found: tuple[str, ...] = ()
    not_among: tuple[str, ...] = ()

    def automaton(self) -> Automaton:
        """Raises TooManyStates."""
        return _automaton(self)

    def contains(self, text: str) -> bool:
        return _automaton(self).accepts(text)

    def is_of_any_characters(self) -> bool:
        """Only the length matters."""
        return not (self.found or self.not_found or self.not_among)

    def _languages(self) -> list[Language]:
        languages: list[Language] = [Pattern(pattern) for pattern in self.found]
        languages += [Pattern(pattern, found=False) for pattern in self.not_found]
        languages.append(Length(self.low, self.high))
        if self.not_among:
            languages.append(Words(self.not_among, among=False))
        return languages

    def widest_languages(self) -> list[Language]:
        """Of all strings of which some reader may say that they fit."""
        given = [pattern for pattern in self.found if pattern not in FORMATS.values()]
        languages: list[Language] = [Pattern(pattern, wide=True) for pattern in given]
        if len(given) == len(self.found):  # else the length may be the format's
            languages.append(Length(self.low, self.high))
        languages += [Pattern(p, found=False, wide=True) for p in self.not_found]
        languages.append(Words(self.not_among, among=False))
        return languages


@lru_cache(maxsize=128)
def _automaton(strings: Strings) -> Automaton:
    return meet(strings._languages())


@dataclass(frozen=True, slots=True)
class Arrays:
    first: tuple[Conjunction, ...]  # item by item
    rest: Conjunction | None  # all further ones; None: there are none
    low: int = 0  # items
    high: int | None = None
    contains: tuple[Conjunction, int] | None = None  # what at least so many items must fit too
    unique: tuple[Json, ...] | None = None  # the items, each at most once
    more_fit: bool = False  # further ones would, though the grammar writes none


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    value: Conjunction
    required: bool


@dataclass(frozen=True, slots=True)
class OtherProperties:
    names: Strings
    value: Conjunction


@dataclass(frozen=True, slots=True)
class Objects:
    named: tuple[Property, ...]  # in the order they are written
    others: tuple[OtherProperties, ...] = field(default=())  # after them, any number
    low: int = 0  # properties
    high: int | None = None
    more_fit: bool = False  # further ones would, though the grammar writes none


class Circular(Exception):
    """What a schema allows would have to be known to tell what it allows."""


Shape = Values | Strings | NumberRange | Arrays | Objects


def key_of(conjunction: Conjunction) -> frozenset[int]:
    """Equal for those that ask for the same."""
    return frozenset(id(node.schema) for node in conjunction if node.schema is not True)
