"""What is wrong with a structural tag, said before the grammar compiler sees it.

A structural tag (xgrammar's document) is a tree of formats; this page knows which formats there
are, where their children lie, and which parts are sources of their own: JSON Schemas and regular
expressions are checked as those that come alone. Places are paths of the document, and go on into
a schema: `$.format.tags[0].content.json_schema.properties.a`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine_service.errors import InvalidRequest
from engine_service.regex_check import check_regex
from engine_service.schema_check import check_schema
from engine_service.schema_error import Json, Schema, shown

FIELD: Final = "structured_output.structural_tag"
MAX_DEPTH: Final = 100  # nested objects and arrays of the document, schemas included
MAX_FORMATS: Final = 2000
RELAX_KEY: Final = "relax_unenforced"  # of a json_schema format: ours, xgrammar knows no such key

# Which keys of a format hold formats: one, or a list of them. Rules are (pattern, format) pairs.
_CHILDREN: Final[dict[str, tuple[str, ...]]] = {
    "const_string": (),
    "json_schema": (),
    "any_text": (),
    "grammar": (),
    "regex": (),
    "token": (),
    "exclude_token": (),
    "any_tokens": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("content",),
    "triggered_tags": ("tags",),
    "token_triggered_tags": ("tags",),
    "tags_with_separator": ("tags",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content",),
    "dispatch": ("rules",),
    "token_dispatch": ("rules",),
}
_SCHEMA_KEYS: Final = {"type", "json_schema", "style", "max_whitespace_cnt", RELAX_KEY}


@dataclass(frozen=True, slots=True)
class CheckedTag:
    text: str  # the document to compile
    relaxed: tuple[str, ...]  # places of schema keywords that were taken out


def check_structural_tag(text: str, *, relax: bool = False) -> CheckedTag:
    """The document to compile, and the places of what was relaxed. `relax` is for the schemas
    that do not say so for themselves. Raises InvalidRequest with the place and the reason."""
    root = _parse(text)
    if not isinstance(root, dict) or root.get("type") != "structural_tag":
        raise _refused("$", 'must be an object of type "structural_tag"')
    relaxed: list[str] = []
    for count, (place, node) in enumerate(_formats(root.get("format"), "$.format"), start=1):
        if count > MAX_FORMATS:
            raise _refused("$", f"has more than {MAX_FORMATS} formats")
        if node["type"] == "json_schema":
            relaxed += _check_schema(place, node, relax)
        elif node["type"] == "regex":
            _check_regex(place, node)
    return CheckedTag(json.dumps(root, ensure_ascii=False), tuple(relaxed))


def _parse(text: str) -> Json:
    try:
        root: Json = json.loads(text)
    except ValueError as error:
        raise _refused("$", "is not valid JSON") from error
    except RecursionError as error:
        raise _refused("$", f"nests deeper than {MAX_DEPTH} levels") from error
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in _values(node)]
    if level:
        raise _refused("$", f"nests deeper than {MAX_DEPTH} levels")
    return root


def _values(node: Json) -> list[Json]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _formats(node: Json, place: str) -> Iterator[tuple[str, Schema]]:
    """The format and all within it."""
    if not isinstance(node, dict):
        raise _refused(place, "must be a format")
    kind = node.get("type", "tag" if place.endswith("]") else None)  # members of `tags` need none
    if not isinstance(kind, str) or kind not in _CHILDREN:
        raise _refused(f"{place}.type", f"{shown(kind)} is no format that is supported")
    node["type"] = kind
    yield place, node
    for key in _CHILDREN[kind]:
        children = node.get(key)
        if not isinstance(children, list):
            yield from _formats(children, f"{place}.{key}")
            continue
        for i, child in enumerate(children):
            below = f"{place}.{key}[{i}]"
            if key == "rules":
                if not isinstance(child, list) or len(child) != 2:
                    raise _refused(below, "must be a pair of a pattern and a format")
                child = child[1]
            yield from _formats(child, below)


def _check_schema(place: str, node: Schema, relax: bool) -> list[str]:
    """Puts the checked schema in its place; returns the places of what was relaxed."""
    for key in node:
        if key not in _SCHEMA_KEYS:
            raise _refused(f"{place}.{key}", "is not supported")
    if node.get("style", "json") != "json":
        raise _refused(f"{place}.style", 'must be "json"')
    own = node.pop(RELAX_KEY, relax)
    if not isinstance(own, bool):
        raise _refused(f"{place}.{RELAX_KEY}", "must be true or false")
    below = f"{place}.json_schema"
    if "json_schema" not in node:
        raise _refused(below, "is missing")
    try:
        checked = check_schema(json.dumps(node["json_schema"]), relax=own)
    except InvalidRequest as error:
        # Its message begins with the path within the schema, `$...: why`.
        raise InvalidRequest(f"{below}{error.message.removeprefix('$')}", field=FIELD) from error
    node["json_schema"] = json.loads(checked.text)
    return [f"{below}{path.removeprefix('$')}" for path in checked.relaxed]


def _check_regex(place: str, node: Schema) -> None:
    pattern = node.get("pattern")
    if not isinstance(pattern, str):
        raise _refused(f"{place}.pattern", "must be a string")
    check_regex(pattern, place=f"{place}.pattern", field=FIELD)


def _refused(place: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: {why}", field=FIELD)
