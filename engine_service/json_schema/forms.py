"""What the values of keywords must look like, wherever they stand."""

from __future__ import annotations

from typing import Final

from engine_service.json_schema.automata import Pattern
from engine_service.json_schema.document import Node, resolve
from engine_service.json_schema.regex import RegexError
from engine_service.schema_error import Json, Schema, refused, shown

MAX_PROPERTIES: Final = 200  # of one object
MAX_LENGTH: Final = 100_000  # characters of a string
MAX_COUNT: Final = 10_000  # items or properties
MAX_ENUM_VALUES: Final = 10_000

TYPES: Final = ("string", "number", "integer", "boolean", "null", "array", "object")
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS: Final = (
    ("minLength", "maxLength", MAX_LENGTH),
    ("minItems", "maxItems", MAX_COUNT),
    ("minContains", "maxContains", MAX_COUNT),
    ("minProperties", "maxProperties", MAX_COUNT),
)


def check_forms(node: Node, root: Schema | bool) -> None:
    """Raises InvalidRequest with the place of a value that no schema may have there."""
    schema = node.schema
    if isinstance(schema, bool):
        return
    if any(key.startswith("\0") for key in schema):
        raise refused(node.path, "has a keyword with a null character")
    _check_type(node.path, schema)
    _check_numbers(node.path, schema)
    _check_counts(node.path, schema)
    _check_values(node.path, schema)
    _check_names(node.path, schema)
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise refused(f"{node.path}.properties", f"has more than {MAX_PROPERTIES} entries")
    if "pattern" in schema:
        check_pattern(f"{node.path}.pattern", schema["pattern"])
    by_pattern = schema.get("patternProperties")
    for pattern in by_pattern if isinstance(by_pattern, dict) else ():
        check_pattern(f"{node.path}.patternProperties", pattern)
    if "$ref" in schema:
        resolve(schema["$ref"], root, node.path)


def check_pattern(place: str, pattern: Json) -> None:
    if not isinstance(pattern, str):
        raise refused(place, "must be a string")
    try:
        Pattern(pattern)
    except RegexError as error:
        raise refused(place, f"can't be enforced as a regular expression: it {error}") from error


def _check_type(path: str, schema: Schema) -> None:
    if "type" not in schema:
        return
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not kinds:
        raise refused(f"{path}.type", "no type is allowed")
    for kind in kinds:
        if kind not in TYPES:
            raise refused(f"{path}.type", f"{shown(kind)} is not a JSON type")


def _check_numbers(path: str, schema: Schema) -> None:
    for key in (*BOUNDS, "multipleOf"):
        value = schema.get(key, 1)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refused(f"{path}.{key}", "must be a number")
        if key == "multipleOf" and value <= 0:
            raise refused(f"{path}.{key}", "must be greater than 0")


def _check_counts(path: str, schema: Schema) -> None:
    for lowest, highest, limit in _COUNTS:
        for key in (lowest, highest):
            value = schema.get(key, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise refused(f"{path}.{key}", "must be a whole number, at least 0")
            if value > limit:
                raise refused(f"{path}.{key}", f"is more than {limit}")
        low, high = schema.get(lowest, 0), schema.get(highest, limit)
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise refused(f"{path}.{lowest}", f"is greater than {highest}")


def _check_values(path: str, schema: Schema) -> None:
    values = schema.get("enum", [None])
    if not isinstance(values, list) or not values:
        raise refused(f"{path}.enum", "must be a list of values")
    if len(values) > MAX_ENUM_VALUES:
        raise refused(f"{path}.enum", f"has more than {MAX_ENUM_VALUES} values")
    if not isinstance(schema.get("uniqueItems", False), bool):
        raise refused(f"{path}.uniqueItems", "must be true or false")


def _check_names(path: str, schema: Schema) -> None:
    _check_name_list(f"{path}.required", schema.get("required", []))
    by_name = schema.get("dependentRequired", {})
    if not isinstance(by_name, dict):
        raise refused(f"{path}.dependentRequired", "must be an object")
    for name, names in by_name.items():
        _check_name_list(f"{path}.dependentRequired.{name}", names)


def _check_name_list(path: str, names: Json) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused(path, "must be a list of strings")
