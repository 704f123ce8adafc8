"""What a request asks of its answer's form, whichever of the many fields says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from clients.errors import InvalidRequest
from clients.types import StructuredOutput
from http_facade.errors import ApiError, invalid
from http_facade.schema import GenerationFields, ResponseFormat, StructuredOutputs

_ENGINE_FIELD = "structured_output"


@dataclass(frozen=True, slots=True)
class Constraint:
    param: str  # the field that says it; errors name it
    output: StructuredOutput
    # For places in the document: which field says what stands there, if it isn't `param`.
    places: tuple[tuple[str, str], ...] = ()

    def refusal(self, error: InvalidRequest) -> ApiError | None:
        """What the engine says against it, naming our own fields; None: it speaks of another."""
        for violation in error.field_violations:
            if violation.field.startswith(_ENGINE_FIELD):
                place, separator, why = violation.description.partition(": ")
                if separator and place.startswith("$"):
                    return invalid(self.param_at(place), why)
                return invalid(self.param, violation.description)
        return None

    def param_at(self, place: str) -> str:
        """`place`: a path of the document, such as `$.properties.a`."""
        for prefix, param in (*self.places, ("$", self.param)):
            rest = place.removeprefix(prefix)
            if place.startswith(prefix) and rest[:1] in ("", ".", "["):
                return param + rest
        return self.param


def constraint_of(request: GenerationFields) -> Constraint | None:
    """Raises ApiError where there is more than one."""
    given = list(_constraints(request))
    if len(given) > 1:
        raise invalid(given[1].param, f"can't be combined with {given[0].param}")
    return given[0] if given else None


def _constraints(request: GenerationFields) -> Iterator[Constraint]:
    if request.response_format is not None:
        yield from _response_format(request.response_format)
    if request.structured_outputs is not None:
        yield from _structured_outputs(request.structured_outputs)
    if request.guided_json is not None:
        schema = _document("guided_json", request.guided_json)
        yield Constraint("guided_json", StructuredOutput(json_schema=schema))
    if request.guided_choice is not None:
        yield _choice("guided_choice", request.guided_choice)
    for param, pattern in (("guided_regex", request.guided_regex), ("regex", request.regex)):
        if pattern is not None:
            yield Constraint(param, StructuredOutput(regex=pattern))
    for param, grammar in (("guided_grammar", request.guided_grammar), ("ebnf", request.ebnf)):
        if grammar is not None:
            yield Constraint(param, StructuredOutput(grammar=grammar))


def _response_format(given: ResponseFormat) -> Iterator[Constraint]:
    where = "response_format"
    if given.type == "json_schema":
        if given.json_schema is None:
            raise invalid(f"{where}.json_schema", "is required with type json_schema")
        schema = _document(f"{where}.json_schema.schema", given.json_schema.schema)
        yield Constraint(f"{where}.json_schema.schema", StructuredOutput(json_schema=schema))
        return
    if given.json_schema is not None:
        raise invalid(f"{where}.json_schema", "needs type json_schema")
    if given.type == "json_object":
        yield Constraint(where, StructuredOutput(json_object=True))


def _structured_outputs(given: StructuredOutputs) -> Iterator[Constraint]:
    where = "structured_outputs"
    if given.json is not None:
        schema = _document(f"{where}.json", given.json)
        yield Constraint(f"{where}.json", StructuredOutput(json_schema=schema))
    if given.json_object:
        yield Constraint(f"{where}.json_object", StructuredOutput(json_object=True))
    if given.regex is not None:
        yield Constraint(f"{where}.regex", StructuredOutput(regex=given.regex))
    if given.choice is not None:
        yield _choice(f"{where}.choice", given.choice)
    if given.grammar is not None:
        yield Constraint(f"{where}.grammar", StructuredOutput(grammar=given.grammar))
    if given.structural_tag is not None:
        tag = _document(f"{where}.structural_tag", given.structural_tag)
        yield Constraint(f"{where}.structural_tag", StructuredOutput(structural_tag=tag))


def _choice(param: str, values: list[str]) -> Constraint:
    if not values:
        raise invalid(param, "has no values")
    return Constraint(param, StructuredOutput(choice=tuple(values)))


def _document(param: str, given: str | dict[str, object]) -> str:
    """As JSON; keys keep their order. A string is taken for the JSON already."""
    if isinstance(given, str):
        return given
    try:
        return msgspec.json.encode(given).decode()
    except RecursionError:
        raise invalid(param, "is nested too deeply") from None
