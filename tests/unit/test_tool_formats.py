"""Which format a template shows, and how tools are told to a model whose template takes none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.text import ChatTemplate
from clients.text.tool_parsers import TOOL_FORMATS, detect_tool_format, tools_as_text
from tests.tool_samples import read_events

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"

# Their decisive lines, in the words of the real templates.
QWEN = (
    '{% if tools %}{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": '
    '<args-json-object>}\\n</tool_call>" }}{% endif %}'
)
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}{{- "
    '\'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.' }}{% endif %}"
)
MISTRAL = "{% if tools is not none %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}{{ '[TOOL_CALLS] [' }}"
MISTRAL_V11 = (
    "{% if tools is not none %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"
)
PYTHONIC = "{% if tools %}{{ '[func_name1(params_name1=params_value1), ...]' }}{% endif %}"
QWEN_CODER = "{% if tools %}{{ '<tool_call>\\n<function=name>arguments' }}{% endif %}"
UNKNOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (MISTRAL_V11, "mistral_v11"),
        (PYTHONIC, "pythonic"),
        (QWEN_CODER, "generic"),
        (UNKNOWN, "generic"),
        (LOOP, "generic"),
        ("{{ '<tool_call> arguments [TOOL_CALLS]' }}", "generic"),  # shown to nobody
    ],
)
def test_a_template_shows_its_format(source: str, name: str) -> None:
    assert detect_tool_format(ChatTemplate(source + LOOP, {})).name == name


def test_the_template_for_tools_counts_where_there_are_two() -> None:
    template = ChatTemplate(LOOP, {}, source_with_tools=QWEN + LOOP)
    assert template.takes_tools and detect_tool_format(template).name == "hermes"
    assert detect_tool_format(None).name == "generic"


@pytest.mark.parametrize("source", [QWEN, LLAMA, MISTRAL, PYTHONIC, UNKNOWN])
def test_a_template_takes_tools_if_it_reads_them(source: str) -> None:
    assert ChatTemplate(source, {}).takes_tools
    assert not ChatTemplate(LOOP + "{# tools #}{{ 'tools' }}", {}).takes_tools
    assert not ChatTemplate("{% set tools = [] %}{{ tools }}", {}).takes_tools


# ---------------------------------------------------------------- tools as text

TOOL = {"type": "function", "function": {"name": "f", "description": "Does é"}}
USER = {"role": "user", "content": "Hi"}
GENERIC = TOOL_FORMATS["generic"]


def assistant(*arguments: object, **fields: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": a}} for a in arguments]
    return {"role": "assistant", "tool_calls": calls, **fields}


def test_conversations_without_tools_stay_as_they_are() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant"}]
    assert tools_as_text(messages, [], GENERIC) == messages


def test_tools_are_described_in_the_system_message() -> None:
    system, user = tools_as_text([USER], [TOOL], GENERIC)
    assert (system["role"], user) == ("system", USER)
    text = str(system["content"])
    assert json.dumps(TOOL["function"], ensure_ascii=False) in text and GENERIC.example in text
    merged = tools_as_text([{"role": "system", "content": "Be kind."}, USER], [TOOL], GENERIC)
    assert [m["content"] for m in merged] == [f"Be kind.\n\n{text}", "Hi"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_the_past_are_written_as_the_model_would(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    message = assistant({"a": "é"}, {}, content="Look:")
    (plain,) = tools_as_text([message], [], tool_format)
    assert plain.keys() == {"role", "content"}
    parser = tool_format.parser(["f"])
    read = read_events([*parser.push(str(plain["content"])), *parser.finish()])
    assert read.content == "Look:"
    assert read.arguments == [{"a": "é"}, {}]


def test_nothing_given_is_changed() -> None:
    messages = [assistant({"a": 1}), {"role": "tool", "content": "15C"}]
    before = json.dumps(messages)
    tools_as_text(messages, [TOOL], GENERIC)
    assert json.dumps(messages) == before


def test_results_are_messages_of_the_user() -> None:
    tool = {"role": "tool", "tool_call_id": "x", "content": "15C"}
    one = "<tool_response>\n15C\n</tool_response>"
    plain = tools_as_text([assistant({}), tool, tool, USER, tool], [], GENERIC)
    assert [m["content"] for m in plain[1:]] == [f"{one}\n{one}", "Hi", one]
    assert {m["role"] for m in plain[1:]} == {"user"}
