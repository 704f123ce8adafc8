"""Constraints as they come over the wire: which one, and whether its size is within the limit."""

from __future__ import annotations

import pytest

from engine_service.constraint import MAX_CHOICES, MAX_SOURCE_BYTES, Constraint, read_constraint
from engine_service.errors import InvalidRequest
from engine_service.messages import StructuredOutput
from protos import engine_pb2 as pb


def read(given: pb.StructuredOutput) -> Constraint | None:
    return read_constraint(pb.GenerateRequest(structured_output=given))


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (pb.StructuredOutput(json_schema="{}"), StructuredOutput("json_schema", "{}")),
        (pb.StructuredOutput(json_object=True), StructuredOutput("json_object")),
        (pb.StructuredOutput(regex="a+"), StructuredOutput("regex", "a+")),
        (pb.StructuredOutput(grammar="root ::= x"), StructuredOutput("grammar", "root ::= x")),
        (pb.StructuredOutput(structural_tag="{}"), StructuredOutput("structural_tag", "{}")),
        (
            pb.StructuredOutput(choice=pb.Choice(values=["ü", "a", "ü"])),
            StructuredOutput("choice", '["a","ü"]'),
        ),
    ],
)
def test_each_kind(given: pb.StructuredOutput, output: StructuredOutput) -> None:
    assert read(given) == Constraint(output)
    given.relax_unenforced = True
    assert read(given) == Constraint(output, relax_unenforced=True)


def test_none_was_asked_for() -> None:
    assert read_constraint(pb.GenerateRequest()) is None
    assert read(pb.StructuredOutput(json_object=False)) is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (pb.StructuredOutput(), "structured_output"),
        (pb.StructuredOutput(json_schema=""), "structured_output.json_schema"),
        (pb.StructuredOutput(regex=""), "structured_output.regex"),
        (pb.StructuredOutput(grammar=""), "structured_output.grammar"),
        (pb.StructuredOutput(structural_tag=""), "structured_output.structural_tag"),
        (pb.StructuredOutput(choice=pb.Choice()), "structured_output.choice"),
        (pb.StructuredOutput(choice=pb.Choice(values=["a", ""])), "structured_output.choice"),
        (
            pb.StructuredOutput(choice=pb.Choice(values=["a"] * (MAX_CHOICES + 1))),
            "structured_output.choice",
        ),
        (
            pb.StructuredOutput(choice=pb.Choice(values=["é" * 1024] * 33)),
            "structured_output.choice",
        ),
    ],
)
def test_what_is_no_constraint_is_named(given: pb.StructuredOutput, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(given)
    assert refusal.value.field == field


def test_a_source_is_limited_in_bytes() -> None:
    limit = MAX_SOURCE_BYTES["grammar"]
    assert read(pb.StructuredOutput(grammar="é" * (limit // 2))) is not None
    with pytest.raises(InvalidRequest, match=str(limit)):
        read(pb.StructuredOutput(grammar="é" * (limit // 2) + "x"))
