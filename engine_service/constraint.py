"""What a caller asks of the output's form: the kinds of constraints, read from the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from engine_service.errors import InvalidRequest
from engine_service.messages import GrammarKind, StructuredOutput
from protos import engine_pb2 as pb

MAX_SOURCE_BYTES: Final[dict[GrammarKind, int]] = {
    "json_schema": 256 * 1024,
    "regex": 8 * 1024,
    "grammar": 64 * 1024,
    "choice": 64 * 1024,  # of all values together
    "structural_tag": 256 * 1024,
}
MAX_CHOICES: Final = 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """As the caller wrote it: of the right size, not checked otherwise."""

    output: StructuredOutput
    relax_unenforced: bool = False  # drop the keywords of schemas that can't be enforced


def read_constraint(request: pb.GenerateRequest) -> Constraint | None:
    """Raises InvalidRequest naming the field."""
    if not request.HasField("structured_output"):
        return None
    given = request.structured_output
    match given.WhichOneof("constraint"):
        case "json_schema":
            output = _sized("json_schema", given.json_schema)
        case "json_object":
            if not given.json_object:
                return None
            output = StructuredOutput("json_object")
        case "regex":
            output = _sized("regex", given.regex)
        case "grammar":
            output = _sized("grammar", given.grammar)
        case "choice":
            output = _choice(given.choice.values)
        case "structural_tag":
            output = _sized("structural_tag", given.structural_tag)
        case _:
            raise InvalidRequest("names no constraint", field="structured_output")
    return Constraint(output, given.relax_unenforced)


def _sized(kind: GrammarKind, source: str) -> StructuredOutput:
    output = StructuredOutput(kind, source)
    num_bytes, limit = len(source.encode()), MAX_SOURCE_BYTES[kind]
    if num_bytes > limit:
        raise InvalidRequest(f"has {num_bytes} bytes, more than {limit}", field=output.field)
    if not source:
        raise InvalidRequest("is empty", field=output.field)
    return output


def _choice(values: Sequence[str]) -> StructuredOutput:
    """The order and repetitions of values mean nothing."""
    output = StructuredOutput("choice", msgspec.json.encode(sorted(set(values))).decode())
    field = output.field
    if not values:
        raise InvalidRequest("has no values", field=field)
    if len(values) > MAX_CHOICES:
        raise InvalidRequest(f"has more than {MAX_CHOICES} values", field=field)
    if "" in values:
        raise InvalidRequest("has an empty value", field=field)
    num_bytes, limit = sum(len(value.encode()) for value in values), MAX_SOURCE_BYTES["choice"]
    if num_bytes > limit:
        raise InvalidRequest(f"has {num_bytes} bytes, more than {limit}", field=field)
    return output
