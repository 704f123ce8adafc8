"""Constraints at the door: what is refused, by place; what is relaxed; what is remembered."""

from __future__ import annotations

import json
import time

import pytest

from engine_service.constraint import Constraint
from engine_service.constraint_checker import ConstraintChecker, check_constraint
from engine_service.errors import InvalidRequest
from engine_service.messages import GrammarKind, StructuredOutput

UNENFORCED = {"type": "array", "uniqueItems": True}


def refusal(kind: GrammarKind, source: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        check_constraint(Constraint(StructuredOutput(kind, source)))
    assert refused.value.field == f"structured_output.{kind}"
    return refused.value


def tag(content: object) -> str:
    tags = [{"begin": "<call>", "content": content, "end": "</call>"}]
    return json.dumps(
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": tags},
        }
    )


def schema_tag(schema: object, **keys: object) -> str:
    return tag({"type": "json_schema", "json_schema": schema, **keys})


@pytest.mark.parametrize(
    "source",
    [
        "{x",
        '{"type": "notatype"}',
        '{"type": "object", "properties": []}',
        '{"$ref": "#/$defs/none"}',
        '{"$ref": "#"}',
        '{"type": "string", "pattern": "(["}',
        '{"type": "array", "minItems": 3, "maxItems": 1}',
        '{"items":' * 5000 + "{}" + "}" * 5000,
        '{"$ref": "\\ud800"}',
        '{"enum": ["\\ud800"]}',
        json.dumps({"enum": ["x" * 100] * 11_000}),
    ],
)
def test_bad_schemas_are_refused_in_time(source: str) -> None:
    start = time.process_time()
    assert "\n" not in refusal("json_schema", source).message
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("([", "not a regular expression"),
        ("(" * 3000 + ")" * 3000, "not a regular expression"),
        ("a{1,99999999999}", "not a regular expression"),
        ("a^b", "^"),
        ("a$b", "$"),
        ("a\\b", ""),
    ],
)
def test_bad_regular_expressions(pattern: str, why: str) -> None:
    assert why in refusal("regex", pattern).message
    place = "$.format.tags[0].content.pattern"
    within = refusal("structural_tag", tag({"type": "regex", "pattern": pattern})).message
    assert within.startswith(place)
    assert why in within


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("{x", "$"),
        ("[]", "$"),
        ('{"type": "structural_tag"}', "$.format"),
        ('{"type": "structural_tag", "format": {"type": "poem"}}', "$.format.type"),
        ('{"type": "structural_tag", "format": [1]}', "$.format"),
        ('{"type": "structural_tag", "format": ' + "[" * 50_000 + "]" * 50_000 + "}", "$"),
        (tag(None), "$.format.tags[0].content"),
        (tag({"type": "json_schema"}), "$.format.tags[0].content.json_schema"),
        (schema_tag({}, any_order=True), "$.format.tags[0].content.any_order"),
        (schema_tag({}, style="qwen_xml"), "$.format.tags[0].content.style"),
        (schema_tag({}, relax_unenforced=1), "$.format.tags[0].content.relax_unenforced"),
        (
            schema_tag({"properties": {"a": UNENFORCED}}),
            "$.format.tags[0].content.json_schema.properties.a.uniqueItems",
        ),
        (
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "dispatch", "rules": [["<a>", {"type": "any"}]]},
                }
            ),
            "$.format.rules[0].type",
        ),
        (
            json.dumps({"type": "structural_tag", "format": {"type": "dispatch", "rules": [7]}}),
            "$.format.rules[0]",
        ),
    ],
)
def test_a_bad_structural_tag_is_named_by_place(source: str, place: str) -> None:
    assert refusal("structural_tag", source).message.startswith(f"{place}: ")


def test_schemas_of_a_structural_tag_are_put_in_their_places() -> None:
    source = schema_tag({"type": "integer"}, relax_unenforced=True)
    checked = check_constraint(Constraint(StructuredOutput("structural_tag", source)))
    assert "relax_unenforced" not in checked.output.source
    assert checked.relaxed == ()
    document = json.loads(checked.output.source)
    assert document["format"]["tags"][0]["type"] == "tag"  # left out, and meant


async def test_what_was_checked_is_known_the_second_time() -> None:
    checker = ConstraintChecker(max_cache_bytes=10_000)
    small, large = (
        Constraint(StructuredOutput("json_schema", json.dumps({"enum": ["x" * n]})))
        for n in (10, 4000)
    )
    for constraint in (small, large):
        first = await checker.check(constraint)
        assert await checker.check(constraint) is first
    relaxing = Constraint(small.output, relax_unenforced=True)
    assert await checker.check(relaxing) is not await checker.check(small)
    first = await checker.check(large)
    await checker.check(
        Constraint(StructuredOutput("json_schema", '{"enum": ["' + "y" * 4000 + '"]}'))
    )
    assert await checker.check(large) is not first  # it had to make room
    checker.close()
