"""A keyword that the grammar would drop is refused by place; what passes is obeyed."""

from __future__ import annotations

import json

import pytest

from engine_service.errors import InvalidRequest
from engine_service.schema_check import check_schema

_INTEGERS = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (_INTEGERS | {"uniqueItems": True}, "$.uniqueItems"),
        (_INTEGERS | {"contains": {"const": 1}}, "$.contains"),
        ({"type": "integer", "enum": ["x"]}, "$.enum[0]"),
        ({"type": "integer", "enum": [1, True]}, "$.enum[1]"),
        ({"type": "string", "const": 1}, "$.const"),
        ({"const": "x", "enum": ["y"]}, "$.enum"),
        ({"type": "string", "pattern": "^a{10}$", "maxLength": 2}, "$.maxLength"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "$.minLength"),
        ({"type": "string", "format": "date", "pattern": "a"}, "$.pattern"),
        ({"type": "string", "format": "date", "maxLength": 2}, "$.maxLength"),
        ({"type": "string", "format": "banana"}, "$.format"),
        ({"type": "string", "pattern": "^a$|^b$"}, "$.pattern"),
        ({"type": "string", "pattern": r"\Aa"}, "$.pattern"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "$.type"),
        ({"type": "string", "allOf": [{"type": "integer"}]}, "$.type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, "$.minimum"),
        ({"type": "integer", "not": {"const": 1}}, "$.not"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "$.if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
        ({"type": "number", "multipleOf": 0.5}, "$.multipleOf"),
        ({"type": "integer", "multipleOf": 2.5}, "$.multipleOf"),
        ({"type": "integer", "multipleOf": 5000}, "$.multipleOf"),
        ({"minimum": 5}, "$.minimum"),
        ({"required": ["a"]}, "$.required"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "$.required[0]"),
        ({"properties": {"b": {}}, "propertyNames": {"pattern": "^a$"}}, "$.propertyNames"),
        ({"additionalProperties": True, "minProperties": 2}, "$.minProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[1]"),
        ({"oneOf": [{"const": "x"}, {"type": "string"}]}, "$.oneOf[0]"),
        ({"oneOf": [{"const": "x"}, {"const": "x"}]}, "$.oneOf[1]"),
        ({"properties": {"a": {"type": "string", "misspelt": 1}}}, "$.properties.a.misspelt"),
        ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "$.additionalItems"),
    ],
)
def test_what_is_not_enforced_is_refused(schema: object, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "t", "description": "d", "default": 1, "examples": [], "$comment": "c"},
        {"$schema": "s", "$id": "i", "deprecated": True, "readOnly": True, "writeOnly": False},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "number", "enum": [1, 1.5]},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "exclusiveMaximum": 100},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": r"^[$^|\]]\$\^(?:a|b){2,3}$"},
        {"type": "string", "pattern": "^[]^]$"},
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 1}}},
        {"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}], "discriminator": {}},
        {"oneOf": [{"const": "x"}, {"const": "y"}]},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "maxItems": 3},
        {"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2},
        {"properties": {"a": {}}, "required": ["a"], "additionalProperties": {"type": "null"}},
    ],
)
def test_what_is_enforced_or_only_describes_passes(schema: object) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "maxLength": 2**31 - 1}, "$.maxLength"),
        ({"type": "array", "minItems": 10**6}, "$.minItems"),
        ({"anyOf": [{"type": "string", "maxLength": i} for i in range(1, 101)]}, "$.anyOf["),
        ({"type": "string", "pattern": "^(([a-z0]{900}){900}){900}$"}, "$.pattern"),
        ({"type": "string", "pattern": r"^(\w+\s?){1,100}$"}, "$.pattern"),
        ({"type": "string", "pattern": r"^(([\w ]{1,3}){1,4}){1,6}$"}, "$.pattern"),
        (
            {
                "properties": {
                    f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{90 + i}}}$"}
                    for i in range(20)
                }
            },
            "$.properties.p",
        ),
        ({"patternProperties": {"^([a-z]{100}){100}$": {}}, "type": "object"}, "$.patternProp"),
    ],
)
def test_what_takes_too_long_to_compile_is_refused(schema: object, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.message.startswith(place)


def test_one_length_for_many_strings_costs_once() -> None:
    name = {"type": "string", "maxLength": 200}
    check_schema(json.dumps({"properties": {f"p{i}": name for i in range(100)}}))


def test_half_of_a_surrogate_pair_is_refused_in_words_that_can_be_sent() -> None:
    for text in (
        r'{"type":"object","properties":{"\ud800":{"type":"bogus"}}}',
        r'{"enum":["\udc00"]}',
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_schema(text)
        caught.value.message.encode()


def test_a_long_name_does_not_make_a_long_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps({"properties": {"p" * 9000: {"type": "bogus"}}}))
    assert len(caught.value.message) < 500
    assert ".type: " in caught.value.message
