"""What is wrong with a JSON Schema, said before the grammar compiler sees it.

The compiler takes minutes over some documents, drops some keywords with a warning and gives a
grammar without any text for others; those are refused here, with the place in the schema. What
the compiler refuses by itself is left to it. Sizes are limited because its cost grows with
their square.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from engine_service.schema_cost import SchemaCost
from engine_service.schema_error import Json, Schema, refused, shown
from engine_service.schema_keywords import check_keywords

MAX_SCHEMA_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 100  # nested objects and arrays of the document
MAX_SUBSCHEMAS: Final = 2000
MAX_PROPERTIES: Final = 200  # of one object
MAX_PATTERN_CHARS: Final = 1000
MAX_PATTERN_REPEATS: Final = 1000

_TYPES = {"string", "number", "integer", "boolean", "null", "array", "object"}
_COUNTS = ("Items", "Length", "Properties")
_SUBSCHEMA_KEYS = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
)
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_REPEATS = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_LOOKAROUND = re.compile(r"\(\?(?!:)")


def check_schema(text: str) -> None:
    """Raises InvalidRequest with the place and the reason."""
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise refused("$", f"the schema has more than {MAX_SCHEMA_BYTES} bytes")
    root = _parse(text)
    if not isinstance(root, dict | bool):
        raise refused("$", "a schema must be an object")
    if root is False:
        raise refused("$", "the schema allows no value")

    cost = SchemaCost()
    settled: set[int] = set()
    for count, (path, schema) in enumerate(_subschemas(root, "$"), start=1):
        if count > MAX_SUBSCHEMAS:
            raise refused("$", f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        _check_type(path, schema)
        _check_counts(path, schema)
        _check_pattern(path, schema, cost)
        _check_shape(path, schema)
        _check_reference(path, schema, root, settled)
        check_keywords(path, schema)
        cost.add(path, schema)


def _parse(text: str) -> Json:
    too_deep = refused("$", f"the schema nests deeper than {MAX_DEPTH} levels")
    try:
        root: Json = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise refused("$", "the schema is not valid JSON") from error
    except RecursionError as error:
        raise too_deep from error
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in _children(node)]
    if level:
        raise too_deep
    try:
        json.dumps(root, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused("$", "the schema has half of a surrogate pair") from error
    return root


def _children(node: Json) -> list[Json]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _subschemas(node: Json, path: str) -> Iterator[tuple[str, Schema]]:
    if not isinstance(node, dict):
        return  # a boolean schema, or something the compiler refuses
    yield path, node
    for key in _SUBSCHEMA_KEYS:
        yield from _subschemas(node.get(key), f"{path}.{key}")
    for key in _SUBSCHEMA_LISTS:
        members = node.get(key)
        if isinstance(members, list):
            for i, member in enumerate(members):
                yield from _subschemas(member, f"{path}.{key}[{i}]")
    for key in _SUBSCHEMA_MAPS:
        entries = node.get(key)
        if isinstance(entries, dict):
            for name, entry in entries.items():
                yield from _subschemas(entry, f"{path}.{key}.{name}")


def _check_type(path: str, schema: Schema) -> None:
    if "type" not in schema:
        return
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not kinds:
        raise refused(f"{path}.type", "no type is allowed")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise refused(f"{path}.type", f"{shown(kind)} is not a JSON type")


def _check_counts(path: str, schema: Schema) -> None:
    for name in _COUNTS:
        low, high = schema.get(f"min{name}", 0), schema.get(f"max{name}")
        for key, value in ((f"min{name}", low), (f"max{name}", high)):
            if value is None and key not in schema:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise refused(f"{path}.{key}", "must be a whole number, at least 0")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise refused(f"{path}.min{name}", f"is greater than max{name}")


def _check_pattern(path: str, schema: Schema, cost: SchemaCost) -> None:
    patterns = [(f"{path}.pattern", schema["pattern"])] if "pattern" in schema else []
    by_name = schema.get("patternProperties")
    if isinstance(by_name, dict):
        patterns += [(f"{path}.patternProperties", pattern) for pattern in by_name]
    for place, pattern in patterns:
        if not isinstance(pattern, str):
            raise refused(place, "must be a string")
        if len(pattern) > MAX_PATTERN_CHARS:
            raise refused(place, f"has more than {MAX_PATTERN_CHARS} characters")
        if _LOOKAROUND.search(pattern):
            raise refused(place, "lookaround and named groups are not supported")
        numbers = [number for pair in _REPEATS.findall(pattern) for number in pair if number]
        if any(len(number) > 9 or int(number) > MAX_PATTERN_REPEATS for number in numbers):
            raise refused(place, f"repeats more than {MAX_PATTERN_REPEATS} times")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise refused(place, "is not a regular expression") from error
        cost.add_pattern(place, pattern)


def _check_shape(path: str, schema: Schema) -> None:
    for key in _SUBSCHEMA_MAPS:
        entries = schema.get(key, {})
        if not isinstance(entries, dict):
            raise refused(f"{path}.{key}", "must be an object")
        if key == "properties" and len(entries) > MAX_PROPERTIES:
            raise refused(f"{path}.{key}", f"has more than {MAX_PROPERTIES} entries")
    for key in _SUBSCHEMA_LISTS:
        if key not in schema:
            continue
        members = schema[key]
        if not isinstance(members, list) or not (members or key == "prefixItems"):
            raise refused(f"{path}.{key}", "must be a list of schemas")
        if key == "allOf" and len(members) > 1:
            raise refused(f"{path}.allOf", "more than one member is not supported")


def _check_reference(path: str, schema: Schema, root: Json, settled: set[int]) -> None:
    """Follows what a schema merely stands for: $ref, and a lone allOf member.

    `settled`: ids of the document's nodes from which that comes to an end, added to here; so each
    node is followed once in the whole document.
    """
    seen: set[int] = set()
    node: Json = schema
    while isinstance(node, dict) and id(node) not in settled:
        if id(node) in seen:
            raise refused(path, "the schema refers to itself and to nothing else")
        seen.add(id(node))
        if "$ref" in node:
            node = _resolve(node["$ref"], root, path)
        elif isinstance(node.get("allOf"), list):
            members = node["allOf"]
            node = members[0] if isinstance(members, list) and members else None
        else:
            break
    settled |= seen


def _resolve(reference: Json, root: Json, path: str) -> Json:
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        raise refused(f"{path}.$ref", "must be '#' or start with '#/'")
    node = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or name not in node:
            raise refused(f"{path}.$ref", f"there is no {shown(reference)}")
        node = node[name]
    return node


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
