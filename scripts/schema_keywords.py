"""Writes docs/json_schema.md from what the schema check does with each keyword; `--check` compares.

Each row is an example that is put to the check: the page can't say what the code does not.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from engine_service.errors import InvalidRequest
from engine_service.json_schema.describing import DESCRIBING
from engine_service.json_schema.formats import FORMATS
from engine_service.json_schema.reader import ENFORCED
from engine_service.schema_check import check_schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "json_schema.md"

HEAD = """# JSON Schema

What is constrained by a schema validates against it: by `response_format`, `structured_outputs`,
strict tools, and `StructuredOutput` on gRPC. A keyword is enforced, or the request is refused with
400 and the keyword's path; none is dropped silently. Tools that are not strict relax instead: what
can't be enforced is taken out of the schema and named in `x-ignored-params` (on gRPC:
`relax_unenforced`, answered by `Accepted.relaxed`). A document that is no schema, allows no value
or takes too long to compile is refused in any case.

The grammar allows a part of what validates, and nothing else:

- JSON is on one line, with `, ` and `: ` between the parts.
- A schema without a `type` is taken for the types that its keywords speak of.
- An object holds the properties that its schema names, in that order, and no others unless
  `additionalProperties`, `patternProperties` or `propertyNames` ask for them. An object whose
  schema names none holds any.
- An array with `prefixItems` ends with them unless `items` says what follows.
- Numbers have at most 15 digits, those with bounds no exponent; so every reader gets the same
  value.
- Patterns are of ECMA-262, found anywhere in the string unless anchored; lookaround, back
  references and `\\b` are refused. Where readers of patterns disagree, as over `\\w` and letters of
  other scripts, only what all of them take is written.
- A format is taken narrowly: `uri`, for one, has letters, digits and the usual marks.

Schemas are of draft 2020-12, with `definitions` as well; `$ref` leads to a place in the document,
and may stand beside other keywords. What a `$ref`, an `allOf` and their siblings say of one value
is met: bounds, lengths, patterns, types, values and properties alike, in recursive schemas too.

Written by `scripts/schema_keywords.py`; `make check` compares it with the code.
"""


@dataclass(frozen=True)
class Row:
    keyword: str
    example: dict[str, object]
    remark: str = ""


A: dict[str, object] = {"type": "null"}

ROWS = [
    Row("type", {"type": ["string", "null"]}, "lists of types too"),
    Row("enum", {"enum": [1, "a", None], "type": "string"}, "what else is said of them holds too"),
    Row("const", {"const": {"a": 1}}),
    Row("minimum", {"type": "number", "minimum": 0.5}),
    Row("maximum", {"type": "integer", "maximum": 9}),
    Row("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}),
    Row("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}),
    Row("multipleOf", {"type": "integer", "multipleOf": 5}, "up to 1024"),
    Row("multipleOf", {"type": "number", "multipleOf": 0.25}, "and other powers of two"),
    Row("multipleOf", {"type": "number", "multipleOf": 0.01}, "floats hold no such multiples"),
    Row("minLength", {"type": "string", "minLength": 2}, "in characters, an escape being one"),
    Row(
        "maxLength",
        {"type": "string", "maxLength": 9},
        "up to 300, each of which takes 15 ms to compile, once for all strings",
    ),
    Row("maxLength", {"type": "string", "maxLength": 500}, "more"),
    Row("pattern", {"type": "string", "pattern": "^[a-z]+$"}),
    Row("pattern", {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}, "beside lengths"),
    Row("pattern", {"type": "string", "pattern": "^(?!a)"}, "lookaround"),
    *(Row("format", {"type": "string", "format": name}) for name in FORMATS),
    Row("format", {"type": "string", "format": "regex"}, "and any other name"),
    Row("items", {"type": "array", "items": A}),
    Row("prefixItems", {"type": "array", "prefixItems": [A]}),
    Row("minItems", {"type": "array", "items": A, "minItems": 2}),
    Row("maxItems", {"type": "array", "items": A, "maxItems": 2}),
    Row(
        "uniqueItems",
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        "of up to 8 listed values",
    ),
    Row(
        "uniqueItems",
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "of other items",
    ),
    Row("contains", {"type": "array", "contains": {"const": 1}}),
    Row("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}),
    Row("maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 2}),
    Row("unevaluatedItems", {"type": "array", "prefixItems": [A], "unevaluatedItems": A}),
    Row("properties", {"type": "object", "properties": {"a": A}}),
    Row(
        "required",
        {"type": "object", "required": ["a"]},
        "names that are not among the properties too",
    ),
    Row(
        "additionalProperties",
        {"type": "object", "properties": {"a": A}, "additionalProperties": A},
    ),
    Row(
        "patternProperties", {"type": "object", "patternProperties": {"^x": A}}, "up to 4 patterns"
    ),
    Row("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    Row(
        "minProperties",
        {"type": "object", "properties": {"a": A}, "minProperties": 1},
        "of named properties",
    ),
    Row("minProperties", {"type": "object", "minProperties": 2}, "of others: they may repeat"),
    Row("maxProperties", {"type": "object", "maxProperties": 2}),
    Row(
        "dependentRequired",
        {"type": "object", "properties": {"a": A, "b": A}, "dependentRequired": {"a": ["b"]}},
    ),
    Row(
        "dependentSchemas",
        {"type": "object", "properties": {"a": A}, "dependentSchemas": {"a": {"maxProperties": 1}}},
    ),
    Row(
        "unevaluatedProperties",
        {"type": "object", "properties": {"a": A}, "unevaluatedProperties": False},
    ),
    Row(
        "unevaluatedProperties",
        {"type": "object", "allOf": [{"properties": {"a": A}}], "unevaluatedProperties": False},
        "beside other schemas of the object",
    ),
    Row("anyOf", {"anyOf": [{"type": "integer"}, A], "minimum": 3}, "beside other keywords too"),
    Row(
        "oneOf",
        {"oneOf": [{"type": "integer"}, A]},
        "where no value fits two: by type, value, range, pattern or a required property",
    ),
    Row(
        "oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "otherwise; relaxed to anyOf"
    ),
    Row("allOf", {"allOf": [{"properties": {"a": A}}, {"required": ["a"]}], "type": "object"}),
    Row(
        "not",
        {"type": "string", "not": {"enum": ["a"]}},
        "of types, strings, patterns, lengths, bounds, counts, required, properties",
    ),
    Row("not", {"type": "integer", "not": {"const": 1}}, "of other schemas"),
    Row(
        "if, then, else",
        {"type": "integer", "if": {"minimum": 9}, "then": {"multipleOf": 3}},
        "where `not` of the `if` is enforced",
    ),
    Row("if, then, else", {"if": {"multipleOf": 3}, "then": {"minimum": 9}}, "otherwise"),
    Row("$ref", {"$ref": "#/$defs/a", "$defs": {"a": A}}, "recursive too"),
    Row("$dynamicRef, $anchor", {"$dynamicRef": "#a", "$anchor": "a"}),
    Row(
        "additionalItems, dependencies",
        {"additionalItems": False, "dependencies": {}},
        "of older drafts",
    ),
    Row("contentEncoding", {"type": "string", "contentEncoding": "base64"}),
    Row("nullable", {"type": "string", "nullable": True}, "OpenAPI's: write the type null"),
    Row("any other", {"misspelt": 1}),
]


def decision(row: Row) -> str:
    text = json.dumps(row.example)
    try:
        check_schema(text)
    except InvalidRequest:
        pass
    else:
        return "enforced"
    try:
        return "refused, or relaxed" if check_schema(text, relax=True).relaxed else "refused"
    except InvalidRequest:
        return "refused"


def table() -> str:
    lines = ["| keyword | example | | remarks |", "|---|---|---|---|"]
    for row in ROWS:
        example = json.dumps(row.example).replace("|", "\\|")
        lines.append(f"| {row.keyword} | `{example}` | {decision(row)} | {row.remark} |")
    return "\n".join(lines)


def describing() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(DESCRIBING))
    return f"Keywords that ask for nothing may stand anywhere: {names}, and those with `x-` before."


def unlisted() -> set[str]:
    """Keywords that the check enforces and this page does not name."""
    listed = {name.strip() for row in ROWS for name in row.keyword.split(",")}
    return {key for key in ENFORCED if not key.startswith("\0")} - listed


def main() -> None:
    if unlisted():
        sys.exit(f"scripts/schema_keywords.py has no row for {', '.join(sorted(unlisted()))}")
    page = "\n".join([HEAD, table(), "", describing(), ""])
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/json_schema.md is behind the code: run `make docs`")


if __name__ == "__main__":
    main()
