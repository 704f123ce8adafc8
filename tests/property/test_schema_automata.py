"""Patterns beside Python's own engine; lengths, words and numbers beside plain arithmetic."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.json_schema.automata import Automaton, Language, Length, Pattern, Words, meet
from engine_service.json_schema.grammar import Grammar, Rule, json_character
from engine_service.json_schema.numbers import Bound, NumberRange, add_number
from engine_service.json_schema.regex import RegexError

# Of all these Python's engine and ECMA-262 say the same, on texts without line feeds.
PIECES = [
    "a",
    "b",
    "c",
    ".",
    "[ab]",
    "[^b]",
    "[a-c]",
    r"\d",
    r"\w",
    r"\.",
    "é",
    "^",
    "$",
    "(?:ab|c)",
]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"]


@st.composite
def patterns(draw: st.DrawFn) -> str:
    def sequence() -> str:
        found = ""
        for _ in range(draw(st.integers(0, 4))):
            piece = draw(st.sampled_from(PIECES))
            found += piece + ("" if piece in "^$" else draw(st.sampled_from(REPEATS)))
        return found

    options = [sequence() for _ in range(draw(st.integers(1, 2)))]
    return "|".join(options)


texts = st.text(alphabet="abcdé1.", max_size=7)


@given(patterns(), st.lists(texts, min_size=1, max_size=8))
def test_a_pattern_takes_what_python_finds(pattern: str, given: list[str]) -> None:
    found, not_found = meet([Pattern(pattern)]), meet([Pattern(pattern, found=False)])
    for text in given:
        if "é" in text and r"\w" in pattern:  # readers disagree: neither side takes it
            continue
        expected = re.search(pattern, text) is not None
        assert found.accepts(text) == expected
        assert not_found.accepts(text) == (not expected)


@given(patterns(), st.integers(0, 3), st.integers(0, 4), st.lists(texts, max_size=3), texts)
def test_what_meets_is_what_all_take(
    pattern: str, low: int, more: int, words: list[str], text: str
) -> None:
    languages: list[Language] = [
        Pattern(pattern),
        Length(low, low + more),
        Words(words, among=False),
    ]
    expected = (
        meet([languages[0]]).accepts(text) and low <= len(text) <= low + more and text not in words
    )
    assert meet(languages).accepts(text) == expected


@given(st.lists(texts, max_size=5), texts)
def test_words(words: list[str], text: str) -> None:
    assert meet([Words(words)]).accepts(text) == (text in words)
    assert meet([Words(words), Words(words, among=False)]) == Automaton((), ())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\w$", "é"),
        (r"^\W$", "é"),
        (r"^\d$", "٣"),
        (r"^\D$", "٣"),
        (r"^[^\w]$", "é"),
        (r"^.$", "\r"),
        (r"^a$", "a\n"),
        (r"^\s$", "\x1c"),
        (r"^\S$", "\x1c"),
    ],
)
def test_where_readers_disagree_neither_side_takes_the_text(pattern: str, text: str) -> None:
    assert not meet([Pattern(pattern)]).accepts(text)
    assert not meet([Pattern(pattern, found=False)]).accepts(text)
    assert meet([Pattern(pattern, wide=True)]).accepts(text)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "[", "[]", "[^]", "[b-a]", "a**", "a++", "*", "^*", "a{2,1}", "a{,2}", "(?=a)"),
        *("(?<n>a)", r"\1", r"\b", r"\x4", r"\ud800", r"\p{L}", r"\Z", "\\", "a" * 1001),
    ],
)
def test_what_is_not_supported_is_an_error(pattern: str) -> None:
    with pytest.raises(RegexError):
        Pattern(pattern)


@pytest.mark.parametrize(
    ("chars", "written"),
    [
        ((("a", "c"),), ["a"]),
        ((('"', '"'),), ['\\"']),
        ((("\n", "\n"),), ["\\n"]),
        ((("\x01", "\x01"),), ["\\u0001"]),
        ((("\x00", "\x1f"),), ["\\b"]),  # among others, those without a short escape are left out
    ],
)
def test_characters_as_json_writes_them(
    chars: tuple[tuple[str, str], ...], written: list[str]
) -> None:
    sequences = json_character(tuple((ord(first), ord(last)) for first, last in chars))
    assert [_first(sequence) for sequence in sequences] == written


def _first(sequence: tuple[object, ...]) -> str:
    text = ""
    for symbol in sequence:
        text += symbol if isinstance(symbol, str) else chr(symbol[0][0])  # type: ignore[index]
    return text


# ---------------------------------------------------------------- numbers


bounds = st.none() | st.builds(
    Bound,
    st.integers(-20_000, 20_000).map(lambda n: Decimal(n) / 100),
    st.booleans(),
)
multiples = st.sampled_from([None, None, Fraction(3), Fraction(1, 2), Fraction(3, 4), Fraction(10)])


@given(st.booleans(), bounds, bounds, multiples, st.integers(-20_100, 20_100))
def test_numbers_are_written_exactly_if_they_are_inside(
    integer: bool, low: Bound | None, high: Bound | None, multiple: Fraction | None, cents: int
) -> None:
    if integer and multiple is not None:
        multiple = Fraction(multiple.numerator)
    numbers = NumberRange(integer, low, high, multiple)
    value = cents / 100
    text = str(cents // 100) if cents % 100 == 0 else str(value)
    grammar = Grammar()
    root = add_number(grammar, numbers)
    takes = _takes(grammar, root, text)
    fits = numbers.contains(int(text) if cents % 100 == 0 else value)
    assert takes == fits


def _takes(grammar: Grammar, root: Rule, text: str) -> bool:
    """Whether rules that end in a rule each, or in nothing, take a text."""
    pending = [(root, text)]
    while pending:
        rule, rest = pending.pop()
        for sequence in grammar.alternatives(rule):
            left: str | None = rest
            for symbol in sequence:
                if isinstance(symbol, Rule):
                    assert left is not None
                    pending.append((symbol, left))
                    left = None
                    break
                assert left is not None
                left = _after(symbol, left)
                if left is None:
                    break
            if left == "":
                return True
    return False


def _after(symbol: str | tuple[tuple[int, int], ...], text: str) -> str | None:
    if isinstance(symbol, str):
        return text.removeprefix(symbol) if text.startswith(symbol) else None
    if text and any(first <= ord(text[0]) <= last for first, last in symbol):
        return text[1:]
    return None
