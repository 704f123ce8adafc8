"""A keyword that no grammar enforces is refused by place, or taken out and named."""

from __future__ import annotations

import json

import pytest

from engine_service.errors import InvalidRequest
from engine_service.schema_check import check_schema

_INTEGERS = {"type": "array", "items": {"type": "integer"}}

# Each with the place that is refused, and what relaxing takes out where that is more.
UNENFORCED: list[tuple[dict[str, object], str, tuple[str, ...]]] = [
    (_INTEGERS | {"uniqueItems": True}, "$.uniqueItems", ()),
    (
        _INTEGERS | {"contains": {"const": 1}, "maxContains": 2},
        "$.maxContains",
        (),
    ),
    ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "$.uniqueItems", ()),
    ({"type": "string", "format": "banana"}, "$.format", ()),
    ({"type": "string", "maxLength": 500}, "$.maxLength", ()),
    ({"type": "string", "pattern": "^[a-z ]*$", "maxLength": 900}, "$.maxLength", ()),
    ({"type": "string", "pattern": "^[a-z ]{900}$"}, "$.pattern", ()),
    ({"type": "string", "pattern": "^(a|b)*a(a|b){14}$"}, "$.pattern", ()),
    ({"type": "string", "contentEncoding": "base64"}, "$.contentEncoding", ()),
    ({"type": "number", "multipleOf": 0.01}, "$.multipleOf", ()),
    ({"type": "integer", "multipleOf": 5000}, "$.multipleOf", ()),
    ({"type": "string", "nullable": True}, "$.nullable", ()),
    ({"type": "integer", "misspelt": 1}, "$.misspelt", ()),
    ({"type": "array", "prefixItems": [{}], "additionalItems": False}, "$.additionalItems", ()),
    ({"type": "integer", "not": {"const": 1}}, "$.not", ()),
    ({"type": "integer", "not": {"multipleOf": 2}}, "$.not", ()),
    ({"type": "array", "not": {"items": {"type": "null"}}}, "$.not", ()),
    ({"type": "integer", "if": {"const": 1}, "then": True}, "$.if", ("$.if", "$.then")),
    ({"type": "integer", "then": {"minimum": 3}}, "$.then", ()),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[1]", ("$.oneOf",)),
    ({"oneOf": [{"const": "x"}, {"type": "string"}]}, "$.oneOf[1]", ("$.oneOf",)),
    ({"oneOf": [{"const": "x"}, {"const": "x"}]}, "$.oneOf[1]", ("$.oneOf",)),
    (
        {"oneOf": [{"const": "é"}, {"type": "string", "pattern": r"^\w$"}]},
        "$.oneOf[1]",
        ("$.oneOf",),
    ),
    (
        {"type": "object", "additionalProperties": True, "minProperties": 2},
        "$.minProperties",
        (),
    ),
    (
        {"allOf": [{"properties": {"a": {}}}], "type": "object", "unevaluatedProperties": False},
        "$.unevaluatedProperties",
        (),
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string", "foo": 1}, "b": {"bar": 2}}},
        "$.properties.a.foo",
        ("$.properties.a.foo", "$.properties.b.bar"),
    ),
]


@pytest.mark.parametrize(("schema", "place", "_"), UNENFORCED)
def test_what_is_not_enforced_is_refused(
    schema: dict[str, object], place: str, _: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(("schema", "place", "places"), UNENFORCED)
def test_what_is_relaxed_is_named_and_the_rest_is_enforced(
    schema: dict[str, object], place: str, places: tuple[str, ...]
) -> None:
    checked = check_schema(json.dumps(schema), relax=True)
    assert sorted(checked.relaxed) == sorted(places or (place,))
    again = check_schema(checked.text)
    assert again.relaxed == ()
    assert again.grammar == checked.grammar


def test_a_one_of_that_is_relaxed_allows_any_of_its_members() -> None:
    members = [{"type": "integer"}, {"type": "number", "maximum": 3}]
    checked = check_schema(json.dumps({"oneOf": members}), relax=True)
    assert json.loads(checked.text) == {"allOf": [{"anyOf": members}]}
    assert check_schema(json.dumps({"anyOf": members})).grammar == checked.grammar


def test_a_document_of_which_nothing_is_relaxed_stays_as_it_was_written() -> None:
    text = ' {"type" : "integer",\n"title":"n" }'
    assert check_schema(text, relax=True).text == text


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "t", "description": "d", "default": 1, "examples": [], "$comment": "c"},
        {"$schema": "s", "$id": "i", "deprecated": True, "readOnly": True, "writeOnly": False},
        {"x-order": 1, "discriminator": {}, "example": 5},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
    ],
)
def test_what_only_describes_changes_nothing(schema: dict[str, object]) -> None:
    plain = {key: value for key, value in schema.items() if key in ("type", "items")}
    described = check_schema(json.dumps(schema))
    assert described.relaxed == ()
    assert described.grammar == check_schema(json.dumps(plain)).grammar


def test_equal_lengths_and_patterns_are_compiled_once() -> None:
    one = {"type": "string", "maxLength": 150}
    many = {"properties": {f"p{i}": one for i in range(50)}}
    alone = check_schema(json.dumps(one)).grammar.count("\n")
    assert check_schema(json.dumps(many)).grammar.count("\n") < alone + 300


def test_without_a_type_those_are_written_that_the_keywords_speak_of() -> None:
    meant = check_schema('{"properties": {"a": {"type": "null"}}}')
    typed = check_schema('{"type": "object", "properties": {"a": {"type": "null"}}}')
    assert meant.grammar == typed.grammar
    with pytest.raises(InvalidRequest, match=r"oneOf\[1\]"):
        check_schema('{"oneOf": [{"properties": {"a": {}}}, {"type": "string"}]}')
