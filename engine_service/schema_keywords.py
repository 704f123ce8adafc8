"""Which keywords of a JSON Schema the grammar enforces, by the form of the schema they stand in.

The compiler reads a schema as exactly one of these forms, the first that applies, and drops what
else stands beside it; a keyword that would be dropped is refused here, with its place.

    $ref  const  enum  anyOf  oneOf  allOf (of one member)  type, or what implies one  anything

Keywords that only describe (`title`, `default`, ...) may stand anywhere.
"""

from __future__ import annotations

import json
from typing import Final

from engine_service.schema_error import Json, Schema, refused, shown

_DESCRIBING: Final = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    ]
)
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BY_TYPE: Final[dict[str, frozenset[str]]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset((*_BOUNDS, "multipleOf")),
    "number": frozenset(_BOUNDS),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "unevaluatedProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        ]
    ),
}
# Without a `type` the compiler takes these for one.
_IMPLIES: Final = {
    "properties": "object",
    "additionalProperties": "object",
    "unevaluatedProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "unevaluatedItems": "array",
}
_FORMATS: Final = frozenset(
    [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_MAX_MULTIPLE: Final = 1024
# Of two of one line only the first is enforced.
_ONE_OF_EACH: Final = (
    ("format", "pattern"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("items", "unevaluatedItems"),
    ("additionalProperties", "unevaluatedProperties"),
    ("patternProperties", "propertyNames"),
    ("properties", "propertyNames"),
)


def check_keywords(path: str, schema: Schema) -> None:
    """Raises InvalidRequest for a keyword that the grammar would not enforce."""
    if schema.get("uniqueItems") is False:  # asks for nothing
        schema = {key: value for key, value in schema.items() if key != "uniqueItems"}
    for form in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
        if form in schema:
            beside = {"type"} if form in ("const", "enum") else set[str]()
            _check_others(path, schema, frozenset(beside | {form}), f"beside {form}")
            _check_values(path, schema, form)
            if form == "oneOf":
                _check_disjoint(path, schema["oneOf"])
            return
    types = _types(schema)
    allowed = frozenset[str]().union(*(_BY_TYPE[kind] for kind in types))
    reason = f"in a schema of type {', '.join(types)}" if types else "without a type"
    _check_others(path, schema, allowed | {"type"}, reason)
    for first, second in _ONE_OF_EACH:
        if first in schema and second in schema:
            raise refused(f"{path}.{second}", f"is not enforced beside {first}")
    _check_string(path, schema)
    _check_multiple(path, schema, types)
    _check_properties(path, schema)


def _check_others(path: str, schema: Schema, allowed: frozenset[str], reason: str) -> None:
    for key in schema:
        if key not in allowed and key not in _DESCRIBING and not key.startswith("x-"):
            name = key if len(key) <= 60 else f"{key[:57]}..."
            raise refused(f"{path}.{name}", f"is not enforced {reason}")


def _types(schema: Schema) -> tuple[str, ...]:
    given = schema.get("type")
    if given is not None:
        kinds = given if isinstance(given, list) else [given]
        return tuple(kind for kind in kinds if isinstance(kind, str))
    return tuple(dict.fromkeys(kind for key, kind in _IMPLIES.items() if key in schema))[:1]


def _check_values(path: str, schema: Schema, form: str) -> None:
    """The listed values are taken as they are, whatever type is asked for beside them."""
    types = _types(schema) if "type" in schema else ()
    if form == "const":
        places = [(f"{path}.const", schema["const"])]
    elif form == "enum" and isinstance(schema["enum"], list):
        places = [(f"{path}.enum[{i}]", value) for i, value in enumerate(schema["enum"])]
    else:
        return
    for place, value in places:
        if types and not any(_is_of(value, kind) for kind in types):
            raise refused(place, f"{shown(value)} is not of type {', '.join(types)}")


def _is_of(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return kind == "number" or (kind == "integer" and whole)
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)] == kind


def _check_string(path: str, schema: Schema) -> None:
    if "format" in schema:
        name = schema["format"]
        if not isinstance(name, str) or name not in _FORMATS:
            raise refused(f"{path}.format", f"{shown(name)} is not enforced")


def _check_multiple(path: str, schema: Schema, types: tuple[str, ...]) -> None:
    if "multipleOf" not in schema:
        return
    value = schema["multipleOf"]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if "number" in types or not whole or not 1 <= value <= _MAX_MULTIPLE:  # type: ignore[operator]
        raise refused(
            f"{path}.multipleOf", f"is enforced for integers only, from 1 to {_MAX_MULTIPLE}"
        )


def _check_properties(path: str, schema: Schema) -> None:
    properties = schema.get("properties", {})
    names = properties if isinstance(properties, dict) else {}
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused(f"{path}.required", "must be a list of strings")
    for i, name in enumerate(required):
        if name not in names:
            raise refused(f"{path}.required[{i}]", f"{shown(name)} is not among the properties")
    patterns = schema.get("patternProperties")
    if patterns and (names or (isinstance(patterns, dict) and len(patterns) > 1)):
        raise refused(f"{path}.patternProperties", "is enforced as an object's only names")
    # Names that the text makes up may repeat, and then count as one.
    open_names = any(
        schema.get(key) not in (None, False)
        for key in ("additionalProperties", "unevaluatedProperties", "patternProperties")
    )
    least = schema.get("minProperties", 0)
    free = open_names or "propertyNames" in schema
    if free and isinstance(least, int) and least > max(len(set(map(str, required))), 1):
        raise refused(f"{path}.minProperties", "is enforced for named properties only")


def _check_disjoint(path: str, members: Json) -> None:
    """The grammar of oneOf is that of anyOf: the same only where no value fits two members."""
    if not isinstance(members, list):
        return
    seen: set[str] = set()
    by_value = all(isinstance(member, dict) and "const" in member for member in members)
    for i, member in enumerate(members):
        fits = _value(member) if by_value else _kinds(member)
        if fits is None or fits & seen:
            raise refused(f"{path}.oneOf[{i}]", "may allow what another member allows; use anyOf")
        seen |= fits


def _value(member: Json) -> set[str] | None:
    """A string, boolean or null that is all a member allows; None: can't be told apart."""
    value = member.get("const") if isinstance(member, dict) else None
    comparable = isinstance(value, str | bool) or value is None
    return {json.dumps(value)} if comparable else None


def _kinds(member: Json) -> set[str] | None:
    """The types that a member allows, integers being numbers; None: can't be told."""
    if not isinstance(member, dict) or "type" not in member:
        return None
    return {"number" if kind == "integer" else kind for kind in _types(member)}
