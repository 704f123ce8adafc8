"""What schemas ask of an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from engine_service.json_schema.document import Node
from engine_service.json_schema.shapes import Arrays, Circular, Conjunction, Shape, Values
from engine_service.json_schema.simple_readers import range_of
from engine_service.json_schema.unenforced import Unenforced
from engine_service.json_schema.values import identity
from engine_service.schema_error import Json

MAX_UNIQUE_VALUES: Final = 8  # each set of those used so far has a rule of its own
MAX_COUNTED_ITEMS: Final = 100  # of an array that is counted while it is searched

_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def read_array(
    world: tuple[Node, ...],
    alternatives: Callable[[Conjunction], Sequence[Shape]],
    unenforced: Unenforced,
) -> Iterator[Arrays]:
    for node in world:
        _check_unevaluated(node, unenforced)
    low, high = range_of(world, "minItems", "maxItems")
    length = max(len(node.members("prefixItems")) for node in world) if world else 0
    first = tuple(tuple(_items_at(world, i)) for i in range(length))
    rest: Conjunction | None = tuple(_items_at(world, length))
    # Items that no schema speaks of are left out, unless there must be more.
    more_fit = bool(length) and not rest and low <= length
    if more_fit:
        rest = None
    if high is not None and low > high:
        return
    contains = _contains(world, low, high, unenforced)
    unique = _unique(world, first, rest, high, contains is not None, alternatives, unenforced)
    yield Arrays(first, rest, low, high, contains, unique, more_fit)


def _items_at(world: tuple[Node, ...], i: int) -> Iterator[Node]:
    for node in world:
        own = node.members("prefixItems")
        if i < len(own):
            yield node.beneath(f".prefixItems[{i}]", own[i])
            continue
        for key in ("items", "unevaluatedItems"):
            if node.has(key):
                yield node.beneath(f".{key}", node.keywords[key])
                break


def _check_unevaluated(node: Node, unenforced: Unenforced) -> None:
    """It is the same as `items`, but beside keywords that may have looked at items as well."""
    if node.has("unevaluatedItems") and any(map(node.has, (*_IN_PLACE, "contains"))):
        unenforced(node, "unevaluatedItems", "is not enforced beside other schemas of the array")


def _contains(
    world: tuple[Node, ...], low: int, high: int | None, unenforced: Unenforced
) -> tuple[Conjunction, int] | None:
    found: tuple[Conjunction, int] | None = None
    for node in world:
        if not node.has("contains"):
            continue
        least = node.count("minContains")
        if least == 0:
            continue
        counted = max(low, high or 0, least or 1)
        if found is not None or counted > MAX_COUNTED_ITEMS:
            unenforced(node, "contains", f"is enforced once, with counts up to {MAX_COUNTED_ITEMS}")
            if node.has("minContains"):
                unenforced(node, "minContains", "says nothing without contains")
            continue
        found = ((node.beneath(".contains", node.keywords["contains"]),), least or 1)
    return found


def _unique(
    world: tuple[Node, ...],
    first: tuple[Conjunction, ...],
    rest: Conjunction | None,
    high: int | None,
    is_searched: bool,
    alternatives: Callable[[Conjunction], Sequence[Shape]],
    unenforced: Unenforced,
) -> tuple[Json, ...] | None:
    asking = [node for node in world if node.keywords.get("uniqueItems")]
    if not asking or (high is not None and high <= 1):
        return None
    values = None
    if not first and rest is not None and not is_searched:
        values = _listed(rest, alternatives)
    if values is not None and len(values) <= MAX_UNIQUE_VALUES:
        return values
    for node in asking:
        unenforced(
            node, "uniqueItems", f"is enforced for items of at most {MAX_UNIQUE_VALUES} values"
        )
    return None


def _listed(
    item: Conjunction, alternatives: Callable[[Conjunction], Sequence[Shape]]
) -> tuple[Json, ...] | None:
    """The values that an item may have; None: too many to list."""
    values: dict[str, Json] = {}
    try:
        shapes = alternatives(item)
    except Circular:
        return None
    for shape in shapes:
        if not isinstance(shape, Values):
            return None
        values |= {identity(value): value for value in shape.values}
    return tuple(values.values())
