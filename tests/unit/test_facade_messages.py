"""What of a request's messages a chat template gets to see."""

from __future__ import annotations

from typing import Any

import pytest

from clients.text import ChatTemplate
from http_facade.decode import CHAT, decode_request
from http_facade.errors import ApiError
from http_facade.messages import template_messages

USER = {"role": "user", "content": "Hi"}


def plain(*messages: dict[str, Any], source: str = "") -> list[dict[str, Any]]:
    body = {"model": "m", "messages": list(messages)}
    request = decode_request(body, CHAT, strict=True).request
    return template_messages(request.messages, ChatTemplate(source, {}))


def assistant(arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        **fields,
    }


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("{}", {}),
        ("", {}),
        (" ", {}),
        ("not JSON", "not JSON"),
        ("[1]", "[1]"),
        ("5", "5"),
        ('{"a"', '{"a"'),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_objects_or_text(arguments: str, given: object) -> None:
    (message,) = plain(assistant(arguments))
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": given}, "id": "call_1"}
    ]


def test_null_missing_and_empty_content_are_the_same() -> None:
    without = plain(assistant())
    assert without == plain(assistant(content=None)) == plain(assistant(content=""))
    assert without[0]["content"] == ""
    answer = {"role": "assistant", "content": "x"}
    assert plain({**answer, "tool_calls": []}) == plain(answer)
    with pytest.raises(ApiError) as caught:
        plain({"role": "tool", "tool_call_id": "call_1"})
    assert caught.value.param == "messages[0].content"


def test_a_result_has_the_name_of_its_function() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "15C"}
    assert plain(USER, assistant(), result)[-1] == {**result, "name": "f"}
    assert plain(assistant(), {**result, "name": "own"})[-1]["name"] == "own"
    for unknown in ({**result, "tool_call_id": "x"}, {"role": "tool", "content": "15C"}):
        assert plain(assistant(), unknown)[-1] == unknown
    parts = [{"type": "text", "text": "15"}, {"type": "text", "text": "C"}]
    assert plain(assistant(), {**result, "content": parts})[-1]["content"] == "15C"


def test_a_developer_is_a_system_to_templates_that_know_none() -> None:
    message = {"role": "developer", "content": "Be kind."}
    assert plain(message)[0]["role"] == "system"
    assert plain(message, source="{{ 'developer' }}")[0]["role"] == "developer"
