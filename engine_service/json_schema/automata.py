"""Sets of texts as automata: patterns, lengths and words left out, met in one.

Whatever a schema says of a string is a regular language, so that any of it can stand beside any
other, be it of one keyword or of several members of an allOf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from engine_service.json_schema import chars
from engine_service.json_schema.chars import CharSet
from engine_service.json_schema.regex import search_automaton

MAX_STATES: Final = 4000
_MAX_STEPS: Final = 400_000


class TooManyStates(ValueError):
    """The automaton would be larger than a grammar should be."""


class Language(Protocol):
    """A deterministic automaton that is made as it is walked; it starts in state 0."""

    def cuts(self) -> Iterable[int]:
        """First code points of ranges in which all characters lead to the same states."""

    def step(self, state: int, char: int) -> int | None:
        """None: no text goes on like that."""

    def accepts(self, state: int) -> bool: ...


class Pattern:
    """Texts in which a pattern is found; or, with `found=False`, those in which it is not.

    Only those of which all readers of the pattern say so; `wide`: of which any does. Raises
    RegexError.
    """

    def __init__(self, pattern: str, *, found: bool = True, wide: bool = False) -> None:
        self._nfa = search_automaton(pattern, wide=wide == found)
        self._found = found
        # Where the expression may be, and whether that is the text's first place.
        self._states: list[tuple[frozenset[int], bool]] = [(frozenset([0]), True)]
        self._numbers = {self._states[0]: 0}
        self._steps: dict[tuple[int, int], int | None] = {}

    def cuts(self) -> Iterator[int]:
        for edges in self._nfa.edges:
            for label, _ in edges:
                yield from _cuts(label)

    def step(self, state: int, char: int) -> int | None:
        if (state, char) not in self._steps:
            self._steps[state, char] = self._step(state, char)
        return self._steps[state, char]

    def _step(self, state: int, char: int) -> int | None:
        nodes, at_start = self._states[state]
        after = frozenset(
            target
            for node in self._nfa.closure(nodes, at_start, end=False)
            for label, target in self._nfa.edges[node]
            if chars.contains(label, char)
        )
        if 1 in self._nfa.closure(after, start=False, end=False):
            if not self._found:
                return None
            after = frozenset([1])  # found, whatever follows
        reached = (after, False)
        if reached not in self._numbers:
            self._numbers[reached] = len(self._states)
            self._states.append(reached)
        return self._numbers[reached]

    def accepts(self, state: int) -> bool:
        nodes, at_start = self._states[state]
        return (1 in self._nfa.closure(nodes, at_start, end=True)) == self._found


class Length:
    """Texts of `low` to `high` characters; None: of any more."""

    def __init__(self, low: int, high: int | None) -> None:
        self._low = low
        self._high = high

    def cuts(self) -> Iterable[int]:
        return ()

    def step(self, state: int, char: int) -> int | None:
        if self._high is None:
            return min(state + 1, self._low)
        return state + 1 if state < self._high else None

    def accepts(self, state: int) -> bool:
        return state >= self._low


class Words:
    """The given texts; or, with `among=False`, all others."""

    def __init__(self, words: Iterable[str], *, among: bool = True) -> None:
        self._among = among
        self._next: list[dict[int, int]] = [{}]
        self._ends: set[int] = set()
        for word in words:
            state = 0
            for char in map(ord, word):
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                state = self._next[state][char]
            self._ends.add(state)
        self._elsewhere = len(self._next)
        self._next.append({})

    def cuts(self) -> Iterator[int]:
        for following in self._next:
            for char in following:
                yield from (char, char + 1)

    def step(self, state: int, char: int) -> int | None:
        target = self._next[state].get(char)
        if target is None and not self._among:
            return self._elsewhere
        return target

    def accepts(self, state: int) -> bool:
        return (state in self._ends) == self._among


@dataclass(frozen=True, slots=True)
class Automaton:
    """Deterministic; it starts in state 0, and from each state some text comes to an end.

    No states: it takes no text at all.
    """

    edges: tuple[tuple[tuple[CharSet, int], ...], ...]  # of each state; sets of one are disjoint
    accepting: tuple[bool, ...]

    def accepts(self, text: str) -> bool:
        if not self.edges:
            return False
        state = 0
        for char in map(ord, text):
            for label, target in self.edges[state]:
                if chars.contains(label, char):
                    state = target
                    break
            else:
                return False
        return self.accepting[state]


def meet(languages: Sequence[Language], max_states: int = MAX_STATES) -> Automaton:
    """Of the texts that all take. Raises TooManyStates."""
    atoms = _atoms(languages)
    start = tuple(0 for _ in languages)
    numbers = {start: 0}
    states = [start]
    edges: list[dict[int, list[tuple[int, int]]]] = []
    steps = 0
    for state in states:  # grows
        targets: dict[int, list[tuple[int, int]]] = {}
        steps += len(atoms)
        if len(states) > max_states or steps > _MAX_STEPS:
            raise TooManyStates
        for first, last in atoms:
            reached = _step_all(languages, state, first)
            if reached is None:
                continue
            if reached not in numbers:
                numbers[reached] = len(states)
                states.append(reached)
            targets.setdefault(numbers[reached], []).append((first, last))
        edges.append(targets)
    accepting = [
        all(part.accepts(at) for part, at in zip(languages, state, strict=True)) for state in states
    ]
    return _trimmed(edges, accepting)


def _step_all(
    languages: Sequence[Language], state: tuple[int, ...], char: int
) -> tuple[int, ...] | None:
    reached: list[int] = []
    for part, at in zip(languages, state, strict=True):
        target = part.step(at, char)
        if target is None:
            return None
        reached.append(target)
    return tuple(reached)


def _atoms(languages: Sequence[Language]) -> list[tuple[int, int]]:
    """Ranges that cover all characters, each of which behaves as one."""
    cuts = {cut for part in languages for cut in part.cuts()}
    atoms: list[tuple[int, int]] = []
    for first, last in chars.ANY:
        inside = sorted(cut for cut in cuts if first < cut <= last)
        starts = [first, *inside]
        ends = [*(cut - 1 for cut in inside), last]
        atoms += zip(starts, ends, strict=True)
    return atoms


def _cuts(label: CharSet) -> Iterator[int]:
    for first, last in label:
        yield from (first, last + 1)


def _trimmed(
    edges: Sequence[dict[int, list[tuple[int, int]]]], accepting: Sequence[bool]
) -> Automaton:
    """Without the states from which no text comes to an end."""
    sources: list[list[int]] = [[] for _ in edges]
    for state, targets in enumerate(edges):
        for target in targets:
            sources[target].append(state)
    alive = {state for state, ends in enumerate(accepting) if ends}
    pending = list(alive)
    while pending:
        for source in sources[pending.pop()]:
            if source not in alive:
                alive.add(source)
                pending.append(source)
    if 0 not in alive:
        return Automaton((), ())
    kept = sorted(alive)
    numbers = {state: number for number, state in enumerate(kept)}
    return Automaton(
        tuple(
            tuple(
                (chars.union([tuple(ranges)]), numbers[target])
                for target, ranges in edges[state].items()
                if target in alive
            )
            for state in kept
        ),
        tuple(accepting[state] for state in kept),
    )
