"""A schema for what another one does not allow, where the keywords have opposites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from engine_service.json_schema.describing import describes
from engine_service.json_schema.forms import TYPES
from engine_service.schema_error import Json, Schema

# Not JSON Schema's: made here only, and never taken from a document.
NOT_FOUND: Final = "\0not a pattern"
NOT_AMONG: Final = "\0not one of"

_BOUNDS: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS: Final = {
    "minLength": ("maxLength", "string", -1),
    "maxLength": ("minLength", "string", 1),
    "minItems": ("maxItems", "array", -1),
    "maxItems": ("minItems", "array", 1),
    "minProperties": ("maxProperties", "object", -1),
    "maxProperties": ("minProperties", "object", 1),
}


Resolve = Callable[[Json], Schema | bool]  # what a $ref stands for


def opposite(schema: Schema | bool, resolve: Resolve) -> Schema | bool | None:
    """Allows what `schema` does not; None: the keywords can't say that."""
    if isinstance(schema, bool):
        return not schema
    members: list[Json] = []
    for key, value in schema.items():
        if describes(key, value):
            continue
        if key == "$ref":
            members.append({"not": resolve(value)})
            continue
        found = _opposite(key, value)
        if found is None:
            return None
        members += found
    return {"anyOf": members} if members else False


def _opposite(key: str, value: Json) -> list[Json] | None:
    """Of one keyword, as alternatives."""
    if key == "type":
        return _other_types(value)
    if key in ("const", "enum"):
        return _other_values(value if key == "enum" and isinstance(value, list) else [value])
    if key in _BOUNDS:
        return [{"type": "number", _BOUNDS[key]: value}]
    if key in _COUNTS and isinstance(value, int):
        name, kind, step = _COUNTS[key]
        return [{"type": kind, name: value + step}] if value + step >= 0 else []
    if key == "pattern":
        return [{"type": "string", NOT_FOUND: value}]
    if key == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {str(name): False}} for name in value]
    if key == "properties" and isinstance(value, dict):
        return [
            {"type": "object", "required": [name], "properties": {name: {"not": below}}}
            for name, below in value.items()
        ]
    if key == "not":
        return [value]
    if key in ("allOf", "anyOf") and isinstance(value, list):
        opposites: list[Json] = [{"not": member} for member in value]
        return opposites if key == "allOf" else [{"allOf": opposites}]
    return None


def _other_types(value: Json) -> list[Json] | None:
    kinds = value if isinstance(value, list) else [value]
    if "integer" in kinds and "number" not in kinds:
        return None  # numbers that are not whole
    left = [kind for kind in TYPES if kind not in kinds and kind != "integer"]
    return [{"type": list[Json](left)}] if left else []


def _other_values(values: list[Json]) -> list[Json] | None:
    words: list[Json] = []
    simple: list[Json] = []
    for value in values:
        if isinstance(value, str):
            words.append(value)
        elif value is None or isinstance(value, bool):
            simple.append(value)
        else:
            return None
    return [*_but(words, simple)]


def _but(words: list[Json], simple: list[Json]) -> Iterator[Json]:
    yield {"type": ["number", "array", "object"]}
    yield {"type": "string", NOT_AMONG: words}
    left: list[Json] = [value for value in (None, True, False) if not _holds(simple, value)]
    if left:
        yield {"enum": left}


def _holds(values: list[Json], value: Json) -> bool:
    return any(value is one for one in values)
