"""What is checked of tools, and what the engine is asked for because of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from clients.testing import FakeEngine
from clients.text.tool_parsers import TOOL_FORMATS, ToolFormat
from http_facade.decode import CHAT, decode_request
from http_facade.errors import ApiError
from http_facade.params import GenerationPlan, plan_chat
from http_facade.tools import ToolPlan, template_tools, unused_tool_fields

MODEL = dataclasses.replace(FakeEngine().model_info, vocab_size=1000)
USER = {"role": "user", "content": "Hi"}
HERMES = TOOL_FORMATS["hermes"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def decoded(**fields: Any) -> Any:
    body = {"model": "m", "messages": [USER], **fields}
    return decode_request(body, CHAT, strict=False).request


def plan(tool_format: ToolFormat = HERMES, **fields: Any) -> GenerationPlan:
    return plan_chat(decoded(**fields), MODEL, tool_format=tool_format, max_stop_strings=4)


def tool_plan(tool_format: ToolFormat = HERMES, **fields: Any) -> ToolPlan:
    planned = plan(tool_format, **fields)
    assert planned.tools is not None and planned.constraint is planned.tools.constraint
    return planned.tools


def document(planned: ToolPlan) -> Any:
    return json.loads(planned.constraint.output.structural_tag or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": function("f")}, "tool_choice"),
        ({"tools": [function("f")], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [function("f")], "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": [function("f")], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
        ),
        ({"tools": [function("f")], "tool_choice": function("g")}, "tool_choice.function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("f\n")]}, "tools[0].function.name"),
        ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function("f", parameters=[])]}, "tools[0].function.parameters"),
        (
            {"tools": [function("f", parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [function(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [function("f")], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {
                "tools": [function("f")],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        ({"tools": [function("f")], "guided_json": {}}, "guided_json"),
        ({"tools": [function("f")], "tool_choice": "required", "regex": "a"}, "regex"),
    ],
)
def test_what_can_not_be_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    assert (caught.value.status, caught.value.param) == (400, param), caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "none"},
        {"tools": [function("f")], "tool_choice": "none"},
    ],
)
def test_without_tools_the_text_is_free(fields: dict[str, Any]) -> None:
    planned = plan(**fields)
    assert planned.tools is None and planned.constraint is None
    assert template_tools(decoded(**fields)) == []


def test_none_leaves_other_constraints_alone() -> None:
    planned = plan(tools=[function("f")], tool_choice="none", regex="a+")
    assert planned.constraint is not None and planned.constraint.param == "regex"


def test_choices() -> None:
    tools = [function("f"), function("g")]
    auto = tool_plan(tools=tools)
    assert auto == tool_plan(tools=tools, tool_choice="auto", parallel_tool_calls=True)
    assert (auto.names, auto.parallel, auto.is_named) == (("f", "g"), True, False)
    assert document(auto)["format"]["type"] == "triggered_tags"
    single = tool_plan(tools=tools, parallel_tool_calls=False)
    assert not single.parallel and document(single)["format"]["stop_after_first"]
    required = tool_plan(tools=tools, tool_choice="required")
    assert required.names == ("f", "g") and not required.is_named
    assert document(required)["format"]["at_least_one"]
    named = tool_plan(tools=tools, tool_choice=function("g"))
    assert (named.names, named.parallel, named.is_named) == (("g",), False, True)
    assert [one.is_forced for one in (auto, single, required, named)] == [False, False, True, True]
    assert document(named)["format"]["type"] == "tag"


def test_auto_goes_with_a_schema_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"é": {"not": {}}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    planned = tool_plan(tools=[function("f"), function("g")], response_format=response_format)
    calls, answer = document(planned)["format"]["elements"]
    assert calls["type"] == "tags_with_separator"
    assert answer == {"type": "json_schema", "json_schema": schema}
    place = "$.format.elements[1].json_schema.properties.é"
    param = "response_format.json_schema.schema.properties.é"
    assert planned.constraint.param_at(place) == param
    any_object = tool_plan(tools=[function("f")], response_format={"type": "json_object"})
    assert document(any_object)["format"]["elements"][1]["json_schema"] == {"type": "object"}
    plain = tool_plan(tools=[function("f")], response_format={"type": "text"})
    assert document(plain)["format"]["type"] == "triggered_tags"


def test_schemas_are_of_objects() -> None:
    def schema(**fields: Any) -> Any:
        tools = [function("f", **fields)]
        (tag,) = document(tool_plan(tools=tools))["format"]["tags"]
        return tag["content"]["json_schema"]

    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema() == schema(parameters=None) == schema(parameters={}) == nothing
    assert schema(parameters=SCHEMA) == SCHEMA
    assert schema(parameters={"properties": {}})["type"] == "object"
    reference = {"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}
    assert schema(parameters=reference) == reference


def test_only_tools_that_are_not_strict_are_relaxed() -> None:
    tools = [function("f", strict=True), function("g", strict=False), function("h")]
    nodes = [tag["content"] for tag in document(tool_plan(tools=tools))["format"]["tags"]]
    assert [node.get("relax_unenforced", False) for node in nodes] == [False, True, True]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS.keys())
@pytest.mark.parametrize("choice", ["auto", "required", function("f10")], ids=str)
def test_places_in_the_document_are_those_of_the_tools(
    tool_format: ToolFormat, choice: object
) -> None:
    tools = [function(f"f{i}", parameters={**SCHEMA, "title": f"{i}"}) for i in range(12)]
    planned = tool_plan(tool_format, tools=tools, tool_choice=choice)
    assert planned.constraint.places
    for place, param in planned.constraint.places:
        node = document(planned)
        for step in place.removeprefix("$.").replace("[", ".").replace("]", "").split("."):
            node = node[int(step)] if step.isdigit() else node[step]
        assert param == f"tools[{node['title']}].function.parameters"
        assert planned.constraint.param_at(f"{place}.properties.a") == f"{param}.properties.a"


def test_a_template_gets_the_tools_in_a_fixed_order_of_keys() -> None:
    given = {"type": "function", "function": {"parameters": SCHEMA, "strict": True, "name": "f"}}
    (tool,) = template_tools(decoded(tools=[given]))
    assert json.dumps(tool) == json.dumps(function("f", parameters=SCHEMA))
    described = template_tools(decoded(tools=[function("f", description="Does it")]))
    assert described == [
        function("f", description="Does it", parameters={"type": "object", "properties": {}})
    ]


def test_a_field_that_says_nothing_without_tools_is_named() -> None:
    assert unused_tool_fields(decoded(parallel_tool_calls=False)) == ("parallel_tool_calls",)
    assert unused_tool_fields(decoded(tools=[], parallel_tool_calls=True)) != ()
    assert unused_tool_fields(decoded()) == ()
    assert unused_tool_fields(decoded(tools=[function("f")], parallel_tool_calls=True)) == ()
