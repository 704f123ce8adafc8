"""The many ways to say what an answer's form is, and whom a refusal of the engine speaks of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.errors import FieldViolation, InvalidRequest
from clients.types import StructuredOutput
from http_facade.constraints import Constraint, constraint_of
from http_facade.decode import COMPLETIONS, decode_request
from http_facade.errors import ApiError

SCHEMA = {"type": "object", "z": 1, "a": "é"}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"), ensure_ascii=False)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TAG_TEXT = json.dumps(TAG, separators=(",", ":"))


def constraint(**fields: Any) -> Constraint | None:
    body = {"model": "m", "prompt": "Hi", **fields}
    return constraint_of(decode_request(body, COMPLETIONS, strict=True).request)


WAYS: list[tuple[dict[str, Any], str, StructuredOutput]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.schema",
        StructuredOutput(SCHEMA_TEXT),
    ),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        StructuredOutput(json_object=True),
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        "structured_outputs.json",
        StructuredOutput(SCHEMA_TEXT),
    ),
    (
        {"structured_outputs": {"json": SCHEMA_TEXT}},
        "structured_outputs.json",
        StructuredOutput(SCHEMA_TEXT),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        "structured_outputs.json_object",
        StructuredOutput(json_object=True),
    ),
    (
        {"structured_outputs": {"regex": "a+"}},
        "structured_outputs.regex",
        StructuredOutput(regex="a+"),
    ),
    (
        {"structured_outputs": {"choice": ["b", "a"]}},
        "structured_outputs.choice",
        StructuredOutput(choice=("b", "a")),
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        "structured_outputs.grammar",
        StructuredOutput(grammar='root ::= "a"'),
    ),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        "structured_outputs.structural_tag",
        StructuredOutput(structural_tag=TAG_TEXT),
    ),
    ({"guided_json": SCHEMA}, "guided_json", StructuredOutput(SCHEMA_TEXT)),
    ({"guided_regex": "a"}, "guided_regex", StructuredOutput(regex="a")),
    ({"guided_choice": ["a"]}, "guided_choice", StructuredOutput(choice=("a",))),
    ({"guided_grammar": "g"}, "guided_grammar", StructuredOutput(grammar="g")),
    ({"regex": "a"}, "regex", StructuredOutput(regex="a")),
    ({"ebnf": "g"}, "ebnf", StructuredOutput(grammar="g")),
]


@pytest.mark.parametrize(("fields", "param", "output"), WAYS, ids=[way[1] for way in WAYS])
def test_every_way_to_say_it(fields: dict[str, Any], param: str, output: StructuredOutput) -> None:
    assert constraint(**fields) == Constraint(param, output)


def test_nothing_said() -> None:
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None
    assert constraint(structured_outputs={}, guided_json=None) is None
    assert constraint(structured_outputs={"json_object": False}) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"guided_grammar": "a", "ebnf": "b"}, "ebnf"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_can_not_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


# ---------------------------------------------------------------- what the engine says

TOOLS = Constraint(
    "tools",
    StructuredOutput(structural_tag="{}"),
    (("$.tags[1].x", "tools[0].parameters"), ("$.tags[10].x", "tools[1].parameters")),
)
PLAIN = Constraint("guided_json", StructuredOutput("{}"))


@pytest.mark.parametrize(
    ("constraint", "said", "param", "why"),
    [
        (PLAIN, "$.properties.a: not is not enforced", "guided_json.properties.a", "not is not"),
        (PLAIN, "$: the schema is not valid JSON", "guided_json", "the schema"),
        (PLAIN, "$.properties.a: b: c", "guided_json.properties.a", "b: c"),
        (PLAIN, "has 9 bytes, more than 8", "guided_json", "has 9 bytes"),
        (TOOLS, "$.tags[1].x.items: no", "tools[0].parameters.items", "no"),
        (TOOLS, "$.tags[10].x[2]: no", "tools[1].parameters[2]", "no"),
        (TOOLS, "$.tags[1].xy: no", "tools.tags[1].xy", "no"),
    ],
)
def test_refusals_name_the_callers_own_field(
    constraint: Constraint, said: str, param: str, why: str
) -> None:
    violation = FieldViolation("structured_output.json_schema", said)
    refusal = constraint.refusal(InvalidRequest("bad", field_violations=(violation,)))
    assert refusal is not None
    assert (refusal.status, refusal.param) == (400, param)
    assert refusal.message.startswith(f"{param}: {why}")


def test_refusals_of_other_fields_are_not_its_own() -> None:
    other = FieldViolation("sampling.temperature", "is wrong")
    assert PLAIN.refusal(InvalidRequest("bad", field_violations=(other,))) is None
