"""A schema as a document: read within limits, its nodes named by their paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine_service.schema_error import Json, Schema, refused, shown

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 100  # nested objects and arrays of the document
MAX_SUBSCHEMAS: Final = 2000

SUBSCHEMA_KEYS: Final = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
SUBSCHEMA_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SUBSCHEMA_MAPS: Final = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema of the document, and where it stands."""

    path: str
    schema: Schema | bool
    within: Node | None = None  # the one that asks for this one of the same value
    rewritten: tuple[Node, str] | None = None  # the keyword this was made of, if it was made

    @property
    def keywords(self) -> Schema:
        """None where the schema is true or false."""
        return self.schema if isinstance(self.schema, dict) else {}

    def beneath(self, path: str, schema: Json, *, same_value: bool = False) -> Node:
        """A schema below this one; `path` starts with a dot or a bracket."""
        if not isinstance(schema, dict | bool):
            raise refused(f"{self.path}{path}", "must be a schema: an object, true or false")
        within = self if same_value else None
        return Node(f"{self.path}{path}", schema, within, self.rewritten)

    def instead(self, key: str, schema: Schema | bool) -> Node:
        """A schema that says of the same value what `key` says here."""
        return Node(f"{self.path}.{key}", schema, self, self.rewritten or (self, key))

    def entries(self, key: str) -> dict[str, Json]:
        """Of a keyword whose value is an object, such as `properties`."""
        value = self.keywords.get(key)
        return value if isinstance(value, dict) else {}

    def members(self, key: str) -> list[Json]:
        """Of a keyword whose value is a list, such as `required`."""
        value = self.keywords.get(key)
        return value if isinstance(value, list) else []

    def has(self, key: str) -> bool:
        return key in self.keywords

    def count(self, key: str) -> int | None:
        """A whole number, or none."""
        value = self.keywords.get(key)
        return value if isinstance(value, int) else None


def parse(text: str) -> Schema | bool:
    """Raises InvalidRequest for what is too large, too deep or no JSON."""
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise refused("$", f"the schema has more than {MAX_BYTES} bytes")
    too_deep = refused("$", f"the schema nests deeper than {MAX_DEPTH} levels")
    try:
        root: Json = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
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
    if not isinstance(root, dict | bool):
        raise refused("$", "a schema must be an object")
    return root


def subschemas(node: Node) -> Iterator[Node]:
    """The node and all below it, those that nothing refers to included."""
    for count, below in enumerate(_subschemas(node), start=1):
        if count > MAX_SUBSCHEMAS:
            raise refused("$", f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        yield below


def _subschemas(node: Node) -> Iterator[Node]:
    schema = node.schema
    yield node
    if isinstance(schema, bool):
        return
    for key in SUBSCHEMA_KEYS:
        if key in schema:
            yield from _subschemas(node.beneath(f".{key}", schema[key]))
    for key in SUBSCHEMA_LISTS:
        members = schema.get(key, [])
        may_be_empty = key == "prefixItems" or key not in schema
        if not isinstance(members, list) or not (members or may_be_empty):
            raise refused(f"{node.path}.{key}", "must be a list of schemas")
        for i, member in enumerate(members):
            yield from _subschemas(node.beneath(f".{key}[{i}]", member))
    for key in SUBSCHEMA_MAPS:
        entries = schema.get(key, {})
        if not isinstance(entries, dict):
            raise refused(f"{node.path}.{key}", "must be an object")
        for name, entry in entries.items():
            yield from _subschemas(node.beneath(f".{key}.{name}", entry))


def resolve(reference: Json, root: Schema | bool, path: str) -> Schema | bool:
    """What a $ref at `path` stands for."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        raise refused(f"{path}.$ref", "must be '#' or start with '#/'")
    found: Json = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name[:6]) < len(found):
            found = found[int(name[:6])]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise refused(f"{path}.$ref", f"there is no {shown(reference)}")
    if not isinstance(found, dict | bool):
        raise refused(f"{path}.$ref", f"{shown(reference)} is not a schema")
    return found


def _children(node: Json) -> list[Json]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return number
