"""What schemas ask of a string, and of a number."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from math import lcm

from engine_service.json_schema.automata import TooManyStates
from engine_service.json_schema.cost import MAX_UNITS, automaton_units
from engine_service.json_schema.document import Node
from engine_service.json_schema.formats import FORMATS, MAX_LENGTHS
from engine_service.json_schema.negation import NOT_AMONG, NOT_FOUND
from engine_service.json_schema.numbers import MAX_MULTIPLE, Bound, NumberRange, step_of
from engine_service.json_schema.shapes import Strings
from engine_service.json_schema.unenforced import Unenforced
from engine_service.schema_error import shown


def read_string(world: tuple[Node, ...], unenforced: Unenforced) -> Iterator[Strings]:
    low, high = range_of(world, "minLength", "maxLength")
    found: list[str] = []
    not_found: list[str] = []
    not_among: list[str] = []
    for node in world:
        schema = node.keywords
        if "format" in schema:
            name = schema["format"]
            if isinstance(name, str) and name in FORMATS:
                found.append(FORMATS[name])
                longest = MAX_LENGTHS.get(name)
                if longest is not None:
                    high = longest if high is None else min(high, longest)
            else:
                unenforced(node, "format", f"{shown(name)} is not enforced")
        found += [str(schema["pattern"])] if "pattern" in schema else []
        not_found += [str(schema[NOT_FOUND])] if NOT_FOUND in schema else []
        not_among += map(str, node.members(NOT_AMONG))
    if high is not None and low > high:
        return
    strings = Strings(low, high, _once(found), _once(not_found), _once(not_among))
    if _takes_too_long(strings):
        _blame(world, unenforced)
        strings = Strings()  # relaxed: what is left of it is read in the next round
    yield strings


def _takes_too_long(strings: Strings) -> bool:
    """To compile, all by itself."""
    if strings.is_of_any_characters():
        return max(strings.low, strings.high or 0) > MAX_UNITS
    try:
        return automaton_units(strings.automaton()) > MAX_UNITS
    except TooManyStates:
        return True


def _blame(world: tuple[Node, ...], unenforced: Unenforced) -> None:
    """The lengths first, which multiply what a pattern takes."""
    for keys in (("maxLength", "minLength"), ("pattern", "format", NOT_FOUND, NOT_AMONG)):
        blamed = [(node, key) for node in world for key in keys if node.has(key)]
        for node, key in blamed:
            unenforced(node, key, "takes too long to compile")
        if blamed:
            return


def _once(texts: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def range_of(world: tuple[Node, ...], lowest: str, highest: str) -> tuple[int, int | None]:
    """The greatest of the lower bounds and the least of the upper ones."""
    lows = [count for node in world if (count := node.count(lowest)) is not None]
    highs = [count for node in world if (count := node.count(highest)) is not None]
    return max(lows, default=0), min(highs, default=None)


def read_number(
    world: tuple[Node, ...], integer: bool, unenforced: Unenforced
) -> Iterator[NumberRange]:
    lows: list[Bound] = []
    highs: list[Bound] = []
    multiple: Fraction | None = None
    for node in world:
        for key, bounds, strict in (
            ("minimum", lows, False),
            ("exclusiveMinimum", lows, True),
            ("maximum", highs, False),
            ("exclusiveMaximum", highs, True),
        ):
            if node.has(key):
                bounds.append(Bound(_decimal(node, key), strict))
        if node.has("multipleOf"):
            multiple = _common(node, multiple, integer, unenforced)
    low = max(lows, key=lambda bound: (bound.value, bound.strict), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.strict), default=None)
    if low is not None and high is not None and low.value > high.value:
        return
    yield NumberRange(integer, low, high, multiple)


def _decimal(node: Node, key: str) -> Decimal:
    return Decimal(repr(node.keywords[key]))


def _common(
    node: Node, multiple: Fraction | None, integer: bool, unenforced: Unenforced
) -> Fraction | None:
    """The least common multiple with the node's own."""
    other = Fraction(_decimal(node, "multipleOf"))
    exact = step_of(other) is not None
    if integer and exact:
        other = Fraction(other.numerator)
    if multiple is not None:
        top = lcm(multiple.numerator * other.denominator, other.numerator * multiple.denominator)
        other = Fraction(top, multiple.denominator * other.denominator)
    step = step_of(other)
    if exact and step is not None and step <= MAX_MULTIPLE:
        return other
    unenforced(
        node,
        "multipleOf",
        f"is enforced for whole numbers up to {MAX_MULTIPLE} and for 0.5, 0.25 and the like",
    )
    return multiple
