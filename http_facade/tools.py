"""What a chat request says of tools, checked, and what the engine is asked for because of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import Tool, ToolFormat, documents
from clients.text.tool_parsers.format import JsonObject
from clients.types import StructuredOutput
from http_facade.constraints import Constraint
from http_facade.errors import invalid
from http_facade.schema import ChatRequest, FunctionDefinition, ToolChoice, ToolDefinition

_NO_PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY_OBJECT: dict[str, object] = {"type": "object"}
# a schema that says one of these at its root says itself what the arguments are
_SAYS_WHAT_IT_IS = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How calls are made in one answer."""

    format: ToolFormat
    names: tuple[str, ...]  # of the functions that may be called
    is_named: bool  # tool_choice names the function
    is_forced: bool  # there are calls and nothing else
    parallel: bool  # more than one call may come
    constraint: Constraint


def special_markers(tool_format: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of those of the format's markers that are special tokens of the model: no text can be
    written with them, so that a constraint has to ask for them by id."""
    ids = {marker: tokenizer.special_id(marker) for marker in tool_format.markers}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None}


def plan_tools(
    request: ChatRequest,
    tool_format: ToolFormat,
    answer: Constraint | None,
    special_ids: Mapping[str, int],
) -> ToolPlan | None:
    """None: no calls are made. `answer`: what is asked of an answer's text. `special_ids`: see
    `special_markers`. Raises ApiError."""
    functions = _functions(request.tools or ())
    choice = request.tool_choice
    if not functions and choice not in (None, "none"):
        raise invalid("tool_choice", "needs tools")
    if not functions or choice == "none":
        return None
    named = _named(choice, functions) if isinstance(choice, ToolChoice) else None
    chosen = [i for i in range(len(functions)) if named in (None, i)]
    is_forced = choice not in (None, "auto")
    parallel = named is None and request.parallel_tool_calls is not False
    document = tool_format.structural_tag(
        [_tool(i, functions[i]) for i in chosen],
        is_forced=is_forced or answer is not None,
        parallel=parallel,
        special_ids=special_ids,
    )
    params = [f"tools[{i}].function.parameters" for i in chosen]
    if answer is not None:
        document = _calls_or_answer(document, answer, is_forced)
        params.append(answer.param)
    return ToolPlan(
        format=tool_format,
        names=tuple(functions[i].name for i in chosen),
        is_named=named is not None,
        is_forced=is_forced,
        parallel=parallel,
        constraint=_constraint(document, params),
    )


def _constraint(document: JsonObject, params: Sequence[str]) -> Constraint:
    """`params`: the fields that hold the document's schemas, in the order of the document."""
    places = _schema_places(document, "$")
    try:
        text = msgspec.json.encode(document).decode()
    except RecursionError:
        raise invalid("tools", "a schema is nested too deeply") from None
    output = StructuredOutput(structural_tag=text)
    return Constraint("tools", output, tuple(zip(places, params, strict=True)))


def _calls_or_answer(calls: JsonObject, answer: Constraint, is_forced: bool) -> JsonObject:
    """Calls and nothing else, or JSON and nothing else: the model chooses by how it begins."""
    if is_forced or not answer.param.startswith("response_format"):
        raise invalid(
            answer.param,
            "can't be combined with tools, unless tool_choice is none"
            " (response_format: none or auto)",
        )
    schema: object = _ANY_OBJECT
    if answer.output.json_schema is not None:
        schema = msgspec.Raw(answer.output.json_schema)
    json_text: JsonObject = {"type": "json_schema", "json_schema": schema}
    return documents.nothing_else(documents.one_of([calls["format"], json_text]))


def template_tools(request: ChatRequest) -> list[dict[str, object]]:
    """The tools as a chat template takes them; with tool_choice none it is told of none."""
    if request.tool_choice == "none":
        return []
    functions = _functions(request.tools or ())
    return [{"type": "function", "function": _described(function)} for function in functions]


def unused_tool_fields(request: ChatRequest) -> tuple[str, ...]:
    """Fields that say nothing without tools."""
    has_tools = bool(request.tools) or request.parallel_tool_calls is None
    return () if has_tools else ("parallel_tool_calls",)


def _functions(tools: Sequence[ToolDefinition]) -> list[FunctionDefinition]:
    functions: dict[str, FunctionDefinition] = {}
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", "only functions can be called here")
        if tool.function is None:
            where = f"tools[{i}].function"
            raise invalid(where, "this field is required", code="missing_required_parameter")
        if tool.function.name in functions:
            raise invalid(f"tools[{i}].function.name", "is another tool's name, too")
        functions[tool.function.name] = tool.function
    return list(functions.values())


def _named(choice: ToolChoice, functions: Sequence[FunctionDefinition]) -> int:
    """The place of the function that is chosen."""
    if choice.type != "function" or choice.function is None:
        raise invalid("tool_choice", "must be none, auto, required or a function by its name")
    for i, function in enumerate(functions):
        if function.name == choice.function.name:
            return i
    raise invalid("tool_choice.function.name", "is none of the tools")


def _tool(index: int, function: FunctionDefinition) -> Tool:
    schema = function.parameters or _NO_PARAMETERS
    if not _SAYS_WHAT_IT_IS & schema.keys():
        schema = {"type": "object", **schema}
    if schema.get("type", "object") != "object":
        raise invalid(f"tools[{index}].function.parameters.type", "arguments are an object")
    return Tool(function.name, schema, relax_unenforced=not function.strict)


def _described(function: FunctionDefinition) -> dict[str, object]:
    described: dict[str, object] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return described


def _schema_places(node: object, place: str) -> Iterator[str]:
    """Where in a structural tag the schemas of its tools stand, in the order of the tools."""
    if isinstance(node, Mapping):
        if node.get("type") == "json_schema":
            yield f"{place}.json_schema"
            return
        for key, child in node.items():
            yield from _schema_places(child, f"{place}.{key}")
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _schema_places(child, f"{place}[{i}]")
