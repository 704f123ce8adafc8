"""What schemas ask of an object.

A property's value must fit what every schema says of that name: by `properties`, by each pattern
that is found in it, or else by `additionalProperties`. Names that no schema lists are sorted by
the patterns found in them, so that each name belongs to one kind of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Final

from engine_service.json_schema.document import Node
from engine_service.json_schema.shapes import (
    Conjunction,
    Objects,
    OtherProperties,
    Property,
    Shape,
    Strings,
    Values,
)
from engine_service.json_schema.simple_readers import range_of
from engine_service.json_schema.unenforced import Unenforced
from engine_service.schema_error import Schema, refused

MAX_PATTERNS: Final = 4  # of names, in one object

_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")
_STRING: Final[Schema] = {"type": "string"}
_BY_DEFAULT: Final = ("additionalProperties", "unevaluatedProperties")


def read_object(
    world: tuple[Node, ...],
    alternatives: Callable[[Conjunction], Sequence[Shape]],
    unenforced: Unenforced,
) -> Iterator[Objects]:
    for node in world:
        if node.has("unevaluatedProperties") and any(map(node.has, _IN_PLACE)):
            unenforced(
                node, "unevaluatedProperties", "is not enforced beside other schemas of the object"
            )
    low, high = range_of(world, "minProperties", "maxProperties")
    names = _names_allowed(world, alternatives)
    listed = _named(world, names)
    if any(entry.required and _has_none(entry.value) for entry in listed):
        return
    named = [entry for entry in listed if not _has_none(entry.value)]
    required = sum(entry.required for entry in named)
    others = _others(world, [entry.name for entry in listed], names)
    if high is not None and (low > high or required > high):
        return
    if low > (max(required, 1) if others else len(named)):
        if not others:
            return
        low = 0
        for node in world:
            if node.has("minProperties"):
                unenforced(node, "minProperties", "is enforced for named properties only")
    more_fit = names is None and not any(map(list, map(_by_default, world)))
    yield Objects(tuple(named), tuple(others), low, high, more_fit)


def _has_none(value: Conjunction) -> bool:
    return any(node.schema is False for node in value)


def _names_allowed(
    world: tuple[Node, ...], alternatives: Callable[[Conjunction], Sequence[Shape]]
) -> list[Strings | Values] | None:
    """By `propertyNames`, as alternatives; None: all."""
    asked = [
        node.beneath(".propertyNames", node.keywords["propertyNames"])
        for node in world
        if node.has("propertyNames")
    ]
    if not asked:
        return None
    shapes = alternatives((*asked, Node(asked[0].path, _STRING)))
    return [shape for shape in shapes if isinstance(shape, Strings | Values)]


def _named(world: tuple[Node, ...], allowed: list[Strings | Values] | None) -> list[Property]:
    required = {name for node in world for name in map(str, node.members("required"))}
    names = dict.fromkeys(
        name
        for node in world
        for name in (*node.entries("properties"), *map(str, node.members("required")))
    )
    for shape in allowed or ():
        if isinstance(shape, Values) and _is_open(world):
            names |= dict.fromkeys(map(str, shape.values))
    return [
        Property(
            name,
            (*_values_at(world, name), *_unless_allowed(world, name, allowed)),
            name in required,
        )
        for name in names
    ]


def _unless_allowed(
    world: tuple[Node, ...], name: str, allowed: list[Strings | Values] | None
) -> Iterator[Node]:
    if allowed is None:
        return
    for shape in allowed:
        if isinstance(shape, Values) and name in shape.values:
            return
        if isinstance(shape, Strings) and shape.contains(name):
            return
    yield Node(world[0].path, False)


def _values_at(world: tuple[Node, ...], name: str) -> Iterator[Node]:
    for node in world:
        spoken_of = False
        properties = node.entries("properties")
        if name in properties:
            spoken_of = True
            yield node.beneath(f".properties.{name}", properties[name])
        for pattern, schema in node.entries("patternProperties").items():
            if _is_found(pattern, name):
                spoken_of = True
                yield node.beneath(f".patternProperties.{pattern}", schema)
        if not spoken_of:
            yield from _by_default(node)


def _by_default(node: Node) -> Iterator[Node]:
    for key in _BY_DEFAULT:
        if node.has(key):
            yield node.beneath(f".{key}", node.keywords[key])
            return


def _is_open(world: tuple[Node, ...]) -> bool:
    """Whether names that no schema lists may stand there: if asked for, or if none lists any."""
    defaults = [node for one in world for node in _by_default(one)]
    if defaults:
        return not _has_none(tuple(defaults))
    speaking = ("properties", "required", "patternProperties")
    return not any(node.has(key) for node in world for key in speaking)


def _others(
    world: tuple[Node, ...], named: list[str], allowed: list[Strings | Values] | None
) -> list[OtherProperties]:
    patterns = dict.fromkeys(
        pattern for node in world for pattern in node.entries("patternProperties")
    )
    if len(patterns) > MAX_PATTERNS:
        raise refused(
            f"{world[0].path}.patternProperties", f"has more than {MAX_PATTERNS} patterns"
        )
    found: list[OtherProperties] = []
    for chosen in product((True, False), repeat=len(patterns)):
        matched = [p for p, is_found in zip(patterns, chosen, strict=True) if is_found]
        unmatched = [p for p, is_found in zip(patterns, chosen, strict=True) if not is_found]
        if not matched and not _is_open(world):
            continue
        value = tuple(_values_by_pattern(world, matched))
        if _has_none(value):
            continue
        for names in [Strings()] if allowed is None else allowed:
            if isinstance(names, Strings):  # listed ones are among those that are named
                found.append(OtherProperties(_sorted_out(names, matched, unmatched, named), value))
    return [other for other in found if other.names.automaton().edges]


@lru_cache(maxsize=256)
def _is_found(pattern: str, name: str) -> bool:
    return Strings(found=(pattern,)).contains(name)


def _sorted_out(
    names: Strings, matched: list[str], unmatched: list[str], named: list[str]
) -> Strings:
    return replace(
        names,
        found=tuple(sorted({*names.found, *matched})),
        not_found=tuple(sorted({*names.not_found, *unmatched})),
        not_among=tuple(sorted({*names.not_among, *named})),
    )


def _values_by_pattern(world: tuple[Node, ...], matched: list[str]) -> Iterator[Node]:
    for node in world:
        own = {p: s for p, s in node.entries("patternProperties").items() if p in matched}
        for pattern, schema in own.items():
            yield node.beneath(f".patternProperties.{pattern}", schema)
        if not own:
            yield from _by_default(node)
