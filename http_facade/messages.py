"""From a request's messages to those that a chat template takes.

Content parts are joined without a separator; content that is null, missing or empty is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clients.text.chat_template import ChatTemplate
from http_facade.errors import invalid
from http_facade.schema import Message, ToolCall


def num_chars_of(message: Message) -> int:
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    calls = [call.function.arguments for call in message.tool_calls or ()]
    return sum(map(len, (*parts, *calls, _thought(message) or "")))


def template_messages(
    messages: Sequence[Message], template: ChatTemplate
) -> list[dict[str, object]]:
    knows_developer = "developer" in template.source
    called: dict[str, str] = {}  # the functions' names, by the ids of their calls
    plain = []
    for i, message in enumerate(messages):
        called |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        plain.append(_template_message(i, message, knows_developer))
        # Some templates want it of a tool's result; OpenAI's messages don't have it.
        if message.role == "tool" and message.tool_call_id in called:
            plain[-1].setdefault("name", called[message.tool_call_id])
    return plain


def _template_message(index: int, message: Message, knows_developer: bool) -> dict[str, object]:
    """Absent fields stay absent, because templates ask with `is defined`."""
    role: str = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    plain: dict[str, object] = {"role": role, "content": _content(index, message)}
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", _thought(message)),
    ):
        if value is not None:
            plain[name] = value
    return plain


def _thought(message: Message) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def _content(index: int, message: Message) -> str:
    where = f"messages[{index}].content"
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise invalid(where, "this field is required", code="missing_required_parameter")
        return ""
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(where, "has no parts")
    for part in content:
        if part.type != "text":
            raise invalid(
                where,
                f"parts of type {part.type[:50]} can't be taken: the model reads text only",
                code="unsupported_content",
            )
        if part.text is None:
            raise invalid(where, "a text part needs text")
    return "".join(part.text or "" for part in content)


def _tool_call(call: ToolCall) -> dict[str, object]:
    plain: dict[str, object] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call)},
    }
    if call.id is not None:
        plain["id"] = call.id
    return plain


def _arguments(call: ToolCall) -> object:
    """Templates expect an object; what is none is passed on as text, but for nothing at all."""
    text = call.function.arguments
    if not text.strip():
        return {}
    try:
        arguments: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
