"""Values of a schema's own: which are equal, of what type, and which fit its other keywords."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from engine_service.json_schema.numbers import NumberRange
from engine_service.json_schema.shapes import (
    Arrays,
    Conjunction,
    Objects,
    Shape,
    Strings,
    Values,
)
from engine_service.schema_error import Json


def written(value: Json) -> str:
    """As the grammar writes it."""
    return json.dumps(value, ensure_ascii=False)


def identity(value: Json) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(identity, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{identity(value[k])}" for k in sorted(value)) + "}"
    return json.dumps(value)


def type_of(value: Json) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


Alternatives = Callable[[Conjunction], Sequence[Shape]]


def fits_any(value: Json, shapes: Sequence[Shape], alternatives: Alternatives) -> bool:
    """Whether a value is one that the shapes allow; `alternatives` opens what is beneath."""
    return any(_fits(value, shape, alternatives) for shape in shapes)


def _fits(value: Json, shape: Shape, alternatives: Alternatives) -> bool:
    match shape:
        case Values():
            return identity(value) in set(map(identity, shape.values))
        case Strings():
            return isinstance(value, str) and shape.contains(value)
        case NumberRange():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and shape.contains(value)  # type: ignore[arg-type]
        case Arrays():
            return isinstance(value, list) and _fits_array(value, shape, alternatives)
        case Objects():
            return isinstance(value, dict) and _fits_object(value, shape, alternatives)


def _fits_array(value: list[Json], shape: Arrays, alternatives: Alternatives) -> bool:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return False
    for i, item in enumerate(value):
        wanted = shape.first[i] if i < len(shape.first) else shape.rest
        if wanted is None and shape.more_fit:
            continue
        if wanted is None or not fits_any(item, alternatives(wanted), alternatives):
            return False
    if shape.unique is not None and len(set(map(identity, value))) < len(value):
        return False
    if shape.contains is None:
        return True
    wanted, least = shape.contains
    return sum(fits_any(item, alternatives(wanted), alternatives) for item in value) >= least


def _fits_object(value: dict[str, Json], shape: Objects, alternatives: Alternatives) -> bool:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return False
    named = {entry.name: entry for entry in shape.named}
    if any(entry.required and entry.name not in value for entry in shape.named):
        return False
    for name, below in value.items():
        if name in named:
            wanted = named[name].value
        else:
            fitting = [other for other in shape.others if other.names.contains(name)]
            if not fitting and not shape.more_fit:
                return False
            wanted = fitting[0].value if fitting else ()
        if not fits_any(below, alternatives(wanted), alternatives):
            return False
    return True
