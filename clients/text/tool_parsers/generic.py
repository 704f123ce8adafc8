"""Calls for models whose template knows no tools: the same marks as `hermes`, and the tools, their
calls and their results as text in the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from clients.text.tool_parsers.format import JsonObject, ToolFormat, WrittenCall
from clients.text.tool_parsers.hermes import Hermes

_SYSTEM_TEXT: Final = """\
You can call functions. Each line here describes one as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these marks:
{example}"""
_RESULT: Final = "<tool_response>\n{}\n</tool_response>"


class Generic(Hermes):
    name = "generic"


def tools_as_text(
    messages: Sequence[JsonObject], tools: Sequence[JsonObject], tool_format: ToolFormat
) -> list[JsonObject]:
    """The same conversation for a template that ignores `tools` and what belongs to them.

    The tools, if there are any, are described in the system message, after what it says already;
    calls are part of the assistant's text; results of calls that follow each other are one user
    message. `messages` hold their text as a string; they and `tools` are as OpenAI's API has them,
    but a call's arguments may be an object, too."""
    plain: list[JsonObject] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(plain, str(message.get("content", "")))
        else:
            plain.append(_with_calls_as_text(message, tool_format))
    return _with_system_text(plain, tools, tool_format) if tools else plain


def _add_result(messages: list[JsonObject], content: str) -> None:
    text = _RESULT.format(content)
    last = messages[-1] if messages else {}
    if str(last.get("content", "")).endswith("</tool_response>") and last.get("role") == "user":
        messages[-1] = {**last, "content": f"{last['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _with_calls_as_text(message: JsonObject, tool_format: ToolFormat) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    text = tool_format.write([_written(call["function"]) for call in calls])
    content = message.get("content") or ""
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": f"{content}\n{text}" if content else text}


def _written(function: Mapping[str, object]) -> WrittenCall:
    arguments = function["arguments"]
    return WrittenCall(str(function["name"]), json.dumps(arguments, ensure_ascii=False))


def _with_system_text(
    messages: list[JsonObject], tools: Sequence[JsonObject], tool_format: ToolFormat
) -> list[JsonObject]:
    described = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = _SYSTEM_TEXT.format(tools="\n".join(described), example=tool_format.example)
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content") or ""
    merged = {**first, "content": f"{content}\n\n{text}" if content else text}
    return [merged, *messages[1:]]
