"""Schemas at the door: which pass, which are refused with what words, and how soon."""

from __future__ import annotations

import json
import time

import pytest

from engine_service.errors import InvalidRequest
from engine_service.json_schema.document import MAX_BYTES, MAX_DEPTH
from engine_service.schema_check import check_schema
from tests.schema_corpus import CORPUS


def refusal(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(text)
    assert caught.value.field == "structured_output.json_schema"
    caught.value.message.encode()
    return caught.value.message


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_passes_as_it_is(name: str) -> None:
    text = json.dumps(CORPUS[name])
    checked = check_schema(text)
    assert checked.text == text
    assert checked.relaxed == ()
    assert checked.grammar.startswith("root ::= ")
    assert check_schema(text, relax=True) == checked


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "$", "not valid JSON"),
        ("{x", "$", "not valid JSON"),
        ('{"maximum": NaN}', "$", "not valid JSON"),
        ('{"maximum": 1e400}', "$", "not valid JSON"),
        ('"s"', "$", "must be an object"),
        ("[]", "$", "must be an object"),
        ("7", "$", "must be an object"),
        ("null", "$", "must be an object"),
        ("false", "$", "allows no value"),
        ('{"type": "notatype"}', "$.type", '"notatype" is not a JSON type'),
        ('{"type": 5}', "$.type", "5 is not a JSON type"),
        ('{"type": []}', "$.type", "no type is allowed"),
        ('{"items": {"type": ["string", 1]}}', "$.items.type", "1 is not a JSON type"),
        ('{"items": [{}]}', "$.items", "must be a schema"),
        ('{"not": 5}', "$.not", "must be a schema"),
        ('{"properties": []}', "$.properties", "must be an object"),
        ('{"properties": {"a": 5}}', "$.properties.a", "must be a schema"),
        ('{"properties": {"a": {"properties": 5}}}', "$.properties.a.properties", "an object"),
        ('{"$defs": {"a": {"type": "b"}}}', "$.$defs.a.type", "not a JSON type"),
        ('{"required": "a"}', "$.required", "list of strings"),
        ('{"dependentRequired": {"a": [5]}}', "$.dependentRequired.a", "list of strings"),
        ('{"$ref": "#/$defs/none"}', "$.$ref", 'there is no "#/$defs/none"'),
        ('{"$ref": "#/enum", "enum": [1]}', "$.$ref", "is not a schema"),
        ('{"$ref": "http://x/y"}', "$.$ref", "must be '#'"),
        ('{"$ref": 5}', "$.$ref", "must be '#'"),
        ('{"type": "string", "pattern": "(["}', "$.pattern", "regular expression"),
        ('{"pattern": 5}', "$.pattern", "must be a string"),
        ('{"pattern": "(?=a)b"}', "$.pattern", "lookaround"),
        ('{"pattern": "(a)\\\\1"}', "$.pattern", "not supported"),
        ('{"pattern": "a\\\\b"}', "$.pattern", "not supported"),
        ('{"pattern": "a{1,100000}"}', "$.pattern", "repeats more than"),
        ('{"pattern": "a{99999999999999}"}', "$.pattern", "repeats more than"),
        ('{"patternProperties": {"([": {}}}', "$.patternProperties", "regular expression"),
        ('{"minItems": 3, "maxItems": 1}', "$.minItems", "greater than maxItems"),
        ('{"minLength": 3, "maxLength": 1}', "$.minLength", "greater than maxLength"),
        ('{"minItems": -1}', "$.minItems", "at least 0"),
        ('{"maxLength": "5"}', "$.maxLength", "whole number"),
        ('{"maxLength": null}', "$.maxLength", "whole number"),
        ('{"minItems": true}', "$.minItems", "whole number"),
        ('{"exclusiveMinimum": true}', "$.exclusiveMinimum", "must be a number"),
        ('{"multipleOf": 0}', "$.multipleOf", "greater than 0"),
        ('{"enum": []}', "$.enum", "list of values"),
        ('{"anyOf": []}', "$.anyOf", "list of schemas"),
        ('{"oneOf": 5}', "$.oneOf", "list of schemas"),
        ('{"$ref": "#"}', "$", "refers to itself"),
        ('{"allOf": [{"$ref": "#"}]}', "$", "refers to itself"),
        ('{"anyOf": [{"$ref": "#"}, {"type": "null"}]}', "$", "refers to itself"),
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},'
            ' "b": {"$ref": "#/$defs/a"}}}',
            "$",
            "refers to itself",
        ),
        ('{"properties": {"a": {"$ref": "#/properties/a"}}}', "$.properties.a", "to itself"),
        ('{"\\u0000not a pattern": "a"}', "$", "null character"),
    ],
)
@pytest.mark.parametrize("relax", [False, True])
def test_unsound_schemas_are_refused_by_place(
    text: str, place: str, reason: str, relax: bool
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(text, relax=relax)
    assert caught.value.message.startswith(place)
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "enum": ["x", "y"]},
        {"allOf": [{"type": "integer"}, {"type": "string"}]},
        {"allOf": [{"enum": ["a"]}, {"const": "b"}]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        {"type": "string", "pattern": "^a{10}$", "maxLength": 2},
        {"type": "string", "format": "date", "maxLength": 2},
        {"type": "string", "pattern": "^a$", "not": {"const": "a"}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_schema_that_no_value_fits_is_refused(schema: object) -> None:
    assert "allows no value" in refusal(json.dumps(schema))


def test_a_chain_of_references_is_followed_once() -> None:
    links = 900
    defs: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    start = time.process_time()
    check_schema(json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {}}}))
    assert time.process_time() - start < 1.0
    defs[f"d{links}"] = {"$ref": f"#/$defs/d{links - 1}"}
    assert "refers to itself" in refusal(json.dumps({"$ref": "#/$defs/d0", "$defs": defs}))


@pytest.mark.parametrize(
    "text",
    [
        '{"items":' * 5000 + "{}" + "}" * 5000,
        '{"items":' * 100_000 + "{}" + "}" * 100_000,
        '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1),
        "[" * 200_000,
        '{"enum":[' + "[" * 900 + "]" * 900 + "]}",
        json.dumps({"enum": ["x" * 100] * (MAX_BYTES // 100)}),
        json.dumps({"enum": list(range(20_000))}),
        json.dumps({"properties": {f"p{i}": {} for i in range(1000)}}),
        json.dumps({"anyOf": [{"type": "string"}] * 5000}),
        json.dumps({"pattern": "(" * 2000 + ")" * 2000}),
        json.dumps({"pattern": "(" * 400 + ")" * 400}),
        json.dumps({"type": "string", "pattern": "^(([a-z0]{900}){900}){900}$"}),
        json.dumps({"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}),
        json.dumps({"type": "string", "pattern": "^(.*a.*b){40}$", "maxLength": 400}),
        json.dumps({"type": "string", "pattern": "^[^,]{1,400}$"}),
        json.dumps({"type": "string", "maxLength": 5000}),
        json.dumps({"type": "array", "items": {"enum": [1]}, "minItems": 10**6}),
        json.dumps(
            {"allOf": [{"anyOf": [{"minimum": i * j} for i in range(9)]} for j in range(9)]}
        ),
        json.dumps({"type": "object", "patternProperties": {f"a{i}": {} for i in range(20)}}),
        json.dumps({"allOf": [{"anyOf": [{"minimum": i}]} for i in range(900)]}),
        json.dumps({"allOf": [*[{"anyOf": [{}, {"minimum": i}]} for i in range(40)], False]}),
        json.dumps(
            {
                "oneOf": [
                    {"type": "string", "pattern": f"^[a-z]{{{i}}}[0-9]{{1,900}}$"}
                    for i in range(60)
                ]
            }
        ),
        json.dumps({"type": "object", "required": [f"p{i}" for i in range(20_000)]}),
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{i}": {"items": {"$ref": f"#/$defs/d{(i + 1) % 900}"}, "uniqueItems": True}
                    for i in range(900)
                },
            }
        ),
        '{"pattern": "' + '\\"' * 100_000,
    ],
)
def test_hostile_schemas_are_refused_at_once(text: str) -> None:
    start = time.process_time()
    assert len(refusal(text)) < 500
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^([a-c]*)*d$"},
        {"type": "string", "pattern": "^(a+)+(a+)+$"},
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "array", "items": {"type": "null"}, "maxItems": 10_000},
        {"properties": {f"p{i}": {"type": "string"} for i in range(200)}},
        {"properties": {f"p{i}": {"type": "string", "maxLength": 150} for i in range(100)}},
    ],
)
def test_large_but_harmless_schemas_pass_in_time(schema: object) -> None:
    start = time.process_time()
    check_schema(json.dumps(schema))
    assert time.process_time() - start < 2.0


def test_half_of_a_surrogate_pair_is_refused_in_words_that_can_be_sent() -> None:
    for text in (
        r'{"type":"object","properties":{"\ud800":{"type":"bogus"}}}',
        r'{"enum":["\udc00"]}',
        '{"enum":["\udc00"]}',
    ):
        refusal(text)


def test_a_long_name_does_not_make_a_long_message() -> None:
    message = refusal(json.dumps({"properties": {"p" * 9000: {"type": "bogus"}}}))
    assert len(message) < 500
    assert ".type: " in message
