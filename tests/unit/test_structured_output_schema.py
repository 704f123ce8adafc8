"""Schemas that are refused at the door, and with what words."""

from __future__ import annotations

import json
import time

import pytest

from engine_service.errors import InvalidRequest
from engine_service.schema_check import MAX_DEPTH, MAX_SCHEMA_BYTES, check_schema

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v", "kids"],
        }
    },
    "$ref": "#/$defs/node",
}
LINKED_LIST = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object"},
        {"type": ["string", "null"]},
        {"type": "string", "pattern": "^[a-z]{1,20}(?:x|y)$"},
        {"type": "string", "minLength": 1, "maxLength": 1},
        {"type": "array", "prefixItems": [], "minItems": 0, "maxItems": 0},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "string"}}},
        {"enum": [{"type": "notatype"}, {"$ref": 5}]},  # values, not schemas
        {"properties": {"a/b": {"type": "null"}, "c": {"$ref": "#/properties/a~1b"}}},
        {"allOf": [{"type": "integer"}]},
        TREE,
        LINKED_LIST,
    ],
)
def test_sound_schemas_pass(schema: object) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "$", "not valid JSON"),
        ("{x", "$", "not valid JSON"),
        ('{"maximum": NaN}', "$", "not valid JSON"),
        ('"s"', "$", "must be an object"),
        ("[]", "$", "must be an object"),
        ("7", "$", "must be an object"),
        ("null", "$", "must be an object"),
        ("false", "$", "allows no value"),
        ('{"type": "notatype"}', "$.type", '"notatype" is not a JSON type'),
        ('{"type": 5}', "$.type", "5 is not a JSON type"),
        ('{"type": []}', "$.type", "no type is allowed"),
        ('{"items": {"type": ["string", 1]}}', "$.items.type", "1 is not a JSON type"),
        ('{"properties": []}', "$.properties", "must be an object"),
        ('{"properties": {"a": {"properties": 5}}}', "$.properties.a.properties", "an object"),
        ('{"$ref": "#/$defs/none"}', "$.$ref", 'there is no "#/$defs/none"'),
        ('{"$ref": "http://x/y"}', "$.$ref", "must be '#'"),
        ('{"$ref": 5}', "$.$ref", "must be '#'"),
        ('{"type": "string", "pattern": "(["}', "$.pattern", "not a regular expression"),
        ('{"pattern": 5}', "$.pattern", "must be a string"),
        ('{"pattern": "(?=a)b"}', "$.pattern", "lookaround"),
        ('{"pattern": "a{1,100000}"}', "$.pattern", "repeats more than"),
        ('{"pattern": "a{99999999999999}"}', "$.pattern", "repeats more than"),
        ('{"patternProperties": {"([": {}}}', "$.patternProperties", "not a regular expression"),
        ('{"minItems": 3, "maxItems": 1}', "$.minItems", "greater than maxItems"),
        ('{"minLength": 3, "maxLength": 1}', "$.minLength", "greater than maxLength"),
        ('{"minItems": -1}', "$.minItems", "at least 0"),
        ('{"maxLength": "5"}', "$.maxLength", "whole number"),
        ('{"maxLength": null}', "$.maxLength", "whole number"),
        ('{"minItems": true}', "$.minItems", "whole number"),
        ('{"anyOf": []}', "$.anyOf", "list of schemas"),
        ('{"oneOf": 5}', "$.oneOf", "list of schemas"),
        ('{"allOf": [{"type": "integer"}, {"minimum": 1}]}', "$.allOf", "more than one member"),
        ('{"$ref": "#"}', "$", "refers to itself"),
        ('{"allOf": [{"$ref": "#"}]}', "$", "refers to itself"),
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},'
            ' "b": {"$ref": "#/$defs/a"}}}',
            "$",
            "refers to itself",
        ),
        ('{"properties": {"a": {"$ref": "#/properties/a"}}}', "$.properties.a", "to itself"),
    ],
)
def test_unsound_schemas_are_refused_by_place(text: str, place: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(text)
    assert caught.value.field == "structured_output.json_schema"
    assert caught.value.message.startswith(f"{place}: ")
    assert reason in caught.value.message


def test_a_chain_of_references_is_followed_once() -> None:
    links = 1900
    defs: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    start = time.process_time()
    check_schema(json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {}}}))
    assert time.process_time() - start < 1.0
    defs[f"d{links}"] = {"$ref": f"#/$defs/d{links - 1}"}
    with pytest.raises(InvalidRequest, match="refers to itself"):
        check_schema(json.dumps({"properties": {"a": {"type": "null"}}, "$defs": defs}))


@pytest.mark.parametrize(
    "text",
    [
        '{"items":' * 5000 + "{}" + "}" * 5000,
        '{"items":' * 100_000 + "{}" + "}" * 100_000,
        '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1),
        "[" * 200_000,
        '{"enum":[' + "[" * 900 + "]" * 900 + "]}",
        json.dumps({"enum": ["x" * 100] * (MAX_SCHEMA_BYTES // 100)}),
        json.dumps({"properties": {f"p{i}": {} for i in range(1000)}}),
        json.dumps({"anyOf": [{"type": "string"}] * 5000}),
        json.dumps({"pattern": "(" * 2000 + ")" * 2000}),
        '{"pattern": "' + '\\"' * 100_000,
    ],
)
def test_oversized_schemas_are_refused_at_once(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        check_schema(text)
    assert time.monotonic() - start < 1.0
    assert len(caught.value.message) < 300
