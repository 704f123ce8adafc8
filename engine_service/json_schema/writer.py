"""Shapes as the rules of a grammar: JSON on one line, with ", " and ": " between the parts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from engine_service.json_schema import chars
from engine_service.json_schema.automata import Automaton, TooManyStates
from engine_service.json_schema.cost import Cost
from engine_service.json_schema.grammar import Grammar, Rule, Sequence, json_character
from engine_service.json_schema.numbers import NumberRange, add_number
from engine_service.json_schema.reader import Reader
from engine_service.json_schema.shapes import (
    Arrays,
    Circular,
    Conjunction,
    Objects,
    Shape,
    Strings,
    Values,
    key_of,
)
from engine_service.json_schema.values import written
from engine_service.schema_error import Json, refused

_COMMA: Final = ", "
_HEX: Final = "0123456789abcdefABCDEF"


class Writer:
    """Of one document's grammar. Equal conjunctions share a rule: so recursion comes to an end."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._grammar = Grammar()
        self._cost = Cost()
        self._rules: dict[frozenset[int], Rule] = {}
        self._shared: dict[object, Rule] = {}  # of strings and numbers, by what they may be
        self._lengths: dict[tuple[int, int | None], Rule] = {}
        self._pending: list[Conjunction] = []

    def write(self, root: Conjunction) -> str:
        """The grammar of a document; raises InvalidRequest, as where it allows no value."""
        self._value(root)
        for conjunction in self._pending:  # grows
            alternatives: list[Sequence] = []
            for shape in self._shapes(conjunction):
                alternatives += self._alternatives(shape, conjunction)
            self._grammar.define(self._rules[key_of(conjunction)], alternatives)
            self._cost.add_rules(conjunction[0].path if conjunction else "$", self._grammar.size)
        text = self._grammar.text()
        if text is None:
            raise refused("$", "the schema allows no value that comes to an end")
        return text

    def _shapes(self, conjunction: Conjunction) -> Many[Shape]:
        try:
            return self._reader.written_alternatives(conjunction)
        except Circular as error:
            path = conjunction[0].path
            raise refused(path, "what it allows depends on what it allows") from error

    def _value(self, conjunction: Conjunction) -> Rule:
        key = key_of(conjunction)
        if key not in self._rules:
            self._rules[key] = self._grammar.reserve()
            self._pending.append(conjunction)
        return self._rules[key]

    def _alternatives(self, shape: Shape, conjunction: Conjunction) -> list[Sequence]:
        path = conjunction[0].path if conjunction else "$"
        match shape:
            case Values():
                return [(written(value),) for value in shape.values]
            case Strings():
                return [(self._string(shape, path),)]
            case NumberRange():
                return [(self._number(shape),)]
            case Arrays():
                return self._array(shape)
            case Objects():
                return self._object(shape, path)

    # ------------------------------------------------------------ strings and numbers

    def _number(self, numbers: NumberRange) -> Rule:
        if numbers not in self._shared:
            self._shared[numbers] = add_number(self._grammar, numbers)
        return self._shared[numbers]

    def _string(self, strings: Strings, path: str) -> Rule:
        if strings not in self._shared:
            if strings.is_of_any_characters():
                contents = self._length(strings.low, strings.high, path)
            else:
                contents = self._automaton(_met(strings, path), path)
            self._shared[strings] = self._grammar.add([('"', contents)])
        return self._shared[strings]

    def _automaton(self, automaton: Automaton, path: str) -> Rule:
        """The string's contents and the quote at its end."""
        self._cost.add_automaton(path, automaton)
        rules = [self._grammar.reserve() for _ in automaton.edges]
        for state, rule in enumerate(rules):
            alternatives: list[Sequence] = [
                (*character, rules[target])
                for label, target in automaton.edges[state]
                for character in json_character(label)
            ]
            if automaton.accepting[state]:
                alternatives.append(('"',))
            self._grammar.define(rule, alternatives)
        return rules[0] if rules else self._grammar.add([])

    def _length(self, low: int, high: int | None, path: str) -> Rule:
        """As `_automaton`; strings of one document share the rules of their last characters."""
        missing: list[tuple[int, int | None]] = []
        at = (low, high)
        while at not in self._lengths:
            self._lengths[at] = self._grammar.reserve()
            missing.append(at)
            at = _one_less(at)
        for at in missing:
            following = self._lengths[_one_less(at)]
            alternatives: list[Sequence] = [('"',)] if at[0] == 0 else []
            if at[1] != 0:
                alternatives += [(*character, following) for character in _ANY_CHARACTER]
            self._grammar.define(self._lengths[at], alternatives)
        self._cost.add_lengths(path, len(missing))
        return self._lengths[low, high]

    # ------------------------------------------------------------ arrays

    def _array(self, arrays: Arrays) -> list[Sequence]:
        if arrays.unique is not None:
            return [("[", self._unique(arrays, arrays.unique, frozenset(), {}))]
        if arrays.contains is not None:
            return [("[", self._searched(arrays, *arrays.contains))]
        return [("[", self._items(arrays))]

    def _items(self, arrays: Arrays) -> Rule:
        """The items and the bracket at the end."""
        length = len(arrays.first)
        counted = length if arrays.rest is None else max(length, arrays.low, arrays.high or 0, 1)
        rules = [self._grammar.reserve() for _ in range(counted + 1)]
        for i, rule in enumerate(rules):
            alternatives: list[Sequence] = [("]",)] if i >= arrays.low else []
            item = arrays.first[i] if i < length else arrays.rest
            if item is not None and (arrays.high is None or i < arrays.high):
                comma = (_COMMA,) if i else ()
                following = rules[min(i + 1, counted)]
                alternatives.append((*comma, self._value(item), following))
            self._grammar.define(rule, alternatives)
        return rules[0]

    def _searched(self, arrays: Arrays, wanted: Conjunction, least: int) -> Rule:
        """As `_items`, and counts those that fit what is looked for; the others may fit too."""
        length = len(arrays.first)
        counted = length if arrays.rest is None else max(length, arrays.low, arrays.high or 0, 1)
        rules = {
            (i, found): self._grammar.reserve()
            for i in range(counted + 1)
            for found in range(least + 1)
        }
        for (i, found), rule in rules.items():
            alternatives: list[Sequence] = []
            if i >= arrays.low and found == least:
                alternatives.append(("]",))
            item = arrays.first[i] if i < length else arrays.rest
            if item is not None and (arrays.high is None or i < arrays.high):
                comma = (_COMMA,) if i else ()
                after = min(i + 1, counted)
                more = min(found + 1, least)
                alternatives.append((*comma, self._value(item), rules[after, found]))
                alternatives.append((*comma, self._value((*item, *wanted)), rules[after, more]))
            self._grammar.define(rule, alternatives)
        return rules[0, 0]

    def _unique(
        self,
        arrays: Arrays,
        values: Many[Json],
        used: frozenset[int],
        rules: dict[frozenset[int], Rule],
    ) -> Rule:
        """As `_items`, each value at most once; a rule for each set of those used so far."""
        if used in rules:
            return rules[used]
        rule = rules[used] = self._grammar.reserve()
        alternatives: list[Sequence] = [("]",)] if len(used) >= arrays.low else []
        if arrays.high is None or len(used) < arrays.high:
            comma = (_COMMA,) if used else ()
            alternatives += [
                (*comma, written(value), self._unique(arrays, values, used | {i}, rules))
                for i, value in enumerate(values)
                if i not in used
            ]
        self._grammar.define(rule, alternatives)
        return rule

    # ------------------------------------------------------------ objects

    def _object(self, objects: Objects, path: str) -> list[Sequence]:
        """Named properties in order, each taken or passed over, then the others.

        A rule for each property and number of those before it, as far as that number matters.
        """
        counted = max(objects.low, objects.high or 0, 1)
        rules = [
            [self._grammar.reserve() for _ in range(counted + 1)]
            for _ in range(len(objects.named) + 1)
        ]
        others = [
            (self._string(other.names, path), ": ", self._value(other.value))
            for other in objects.others
        ]
        for i, by_count in enumerate(rules):
            for count, rule in enumerate(by_count):
                comma = (_COMMA,) if count else ()
                more = min(count + 1, counted)
                full = objects.high is not None and count >= objects.high
                alternatives: list[Sequence] = []
                if i < len(objects.named):
                    entry = objects.named[i]
                    if not full:
                        key = f"{written(entry.name)}: "
                        value = self._value(entry.value)
                        alternatives.append((*comma, key, value, rules[i + 1][more]))
                    if not entry.required:
                        alternatives.append((rules[i + 1][count],))
                else:
                    if not full:
                        alternatives += [(*comma, *other, by_count[more]) for other in others]
                    if count >= objects.low:
                        alternatives.append(("}",))
                self._grammar.define(rule, alternatives)
        return [("{", rules[0][0])]


def _one_less(length: tuple[int, int | None]) -> tuple[int, int | None]:
    """What is left of a string's bounds after one more character."""
    low, high = length
    return max(low - 1, 0), None if high is None else max(high - 1, 0)


def _met(strings: Strings, path: str) -> Automaton:
    try:
        return strings.automaton()
    except TooManyStates as error:
        raise refused(path, "the string's patterns and lengths take too long to compile") from error


def _any_character() -> list[Sequence]:
    """Any spelling of one character, escapes included; halves of surrogate pairs in pairs."""
    digit = chars.of(_HEX)
    below_d = chars.of("0123456789abcefABCEF")
    return [
        *json_character(chars.ANY),
        ("\\/",),
        ("\\u", below_d, digit, digit, digit),
        ("\\u", chars.of("dD"), chars.of("01234567"), digit, digit),
        (
            *("\\u", chars.of("dD"), chars.of("89abAB"), digit, digit),
            *("\\u", chars.of("dD"), chars.of("cdefCDEF"), digit, digit),
        ),
    ]


_ANY_CHARACTER: Final = _any_character()
