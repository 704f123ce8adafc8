"""Thoughts over HTTP, told apart from content, with an engine that says exactly what it is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clients.errors import FieldViolation, InvalidRequest
from clients.testing import Script
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    Harness,
    chat,
    check_envelope,
    completion,
    facade_and_fake,
    prompt_ids,
)
from tests.serving import Stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

THINKING = "<think>\nTwo and two…\nis four.\n</think>\n\nFour."
THOUGHT = "Two and two…\nis four."
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

# As Qwen3's: thinking can be switched off, and thoughts of earlier turns are shown on demand.
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}<tool_call>arguments{% endif %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif opens_thought is defined %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def thinking_model_dir(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded tokenizer with a template of a model that thinks."""
    directory = tmp_path_factory.mktemp("thinking")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(embedded_model_dir / name, directory / name)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(thinking_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(thinking_model_dir) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say(THINKING)
    return shared


def streamed_message(answer: Stream) -> dict[str, Any]:
    """The deltas added up, as clients do."""
    message: dict[str, Any] = {}
    for choice in answer.choice_chunks():
        for name in ("reasoning", "reasoning_content", "content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
    message["content"] = message["content"] or None
    return message


async def both(facade: Harness, **fields: Any) -> dict[str, Any]:
    """The answer, whose message is the same in a stream and in one piece."""
    status, body, _ = await facade.post(CHAT, chat(**fields))
    assert status == 200, body
    asked = {"stream_options": {"include_usage": True}}
    streamed = await facade.stream(CHAT, chat(**fields, **asked))
    (choice,) = body["choices"]
    names = ("reasoning", "reasoning_content", "content")
    said = {name: choice["message"][name] for name in names if name in choice["message"]}
    assert streamed_message(streamed) == {**said, "content": said["content"] or None}
    assert streamed.finish_reasons() == [choice["finish_reason"]]
    assert streamed.usage() == body["usage"]
    return body


def message_of(body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


def reasoning_tokens(body: dict[str, Any]) -> int:
    count: int = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


async def test_the_thought_is_sent_under_both_names_and_counted(facade: Harness) -> None:
    for size in (1, 2, 5, 100):
        token_ids = facade.say(THINKING, chunk_sizes=size)
        body = await both(facade)
        assert message_of(body) == {
            "role": "assistant",
            "content": "Four.",
            "reasoning": THOUGHT,
            "reasoning_content": THOUGHT,
            "refusal": None,
        }
        assert body["usage"]["completion_tokens"] == len(token_ids) + 1
        thought_ids = facade.tok.encode(THINKING.partition("\n\n")[0], add_special_tokens=False)
        assert abs(reasoning_tokens(body) - len(thought_ids)) <= 1


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_one_name_may_be_chosen(thinking_model_dir: Path, field: str) -> None:
    async with facade_and_fake(thinking_model_dir, reasoning_field=field) as facade:
        facade.say(THINKING)
        message = message_of(await both(facade))
        assert message[field] == THOUGHT
        assert {"reasoning", "reasoning_content"} & message.keys() == {field}


async def test_no_parser_leaves_the_text_as_it_is(thinking_model_dir: Path) -> None:
    async with facade_and_fake(thinking_model_dir, reasoning_parser="none") as facade:
        facade.say(THINKING)
        body = await both(facade)
        assert message_of(body)["content"] == THINKING and reasoning_tokens(body) == 0
        assert "reasoning" not in message_of(body)


async def test_an_answer_without_thought_is_content(facade: Harness) -> None:
    facade.say("Four. <think>really</think>")
    body = await both(facade)
    assert message_of(body)["content"] == "Four. <think>really</think>"
    assert "reasoning" not in message_of(body) and reasoning_tokens(body) == 0


async def test_a_thought_that_is_cut_off(facade: Harness) -> None:
    facade.say("<think>\nTwo and")
    body = await both(facade)
    message = message_of(body)
    assert (message["content"], message["reasoning"]) == (None, "Two and")
    assert body["usage"]["completion_tokens"] - reasoning_tokens(body) <= 1  # the end token


async def test_the_prompt_may_have_opened_the_thought_or_closed_it(facade: Harness) -> None:
    facade.say("Two and two.\n</think>\nFour.")
    message = message_of(await both(facade, chat_template_kwargs={"opens_thought": True}))
    assert (message["reasoning"], message["content"]) == ("Two and two.", "Four.")
    facade.say("<think>Four.")
    message = message_of(await both(facade, chat_template_kwargs={"enable_thinking": False}))
    assert message["content"] == "<think>Four." and "reasoning" not in message


async def test_a_continued_message_goes_on_in_its_thought(facade: Harness) -> None:
    facade.say(" two.</think>Four.")
    history = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>Two and"},
    ]
    message = message_of(await both(facade, messages=history, continue_final_message=True))
    assert (message["reasoning"], message["content"]) == ("two.", "Four.")


async def test_stop_strings_count_in_the_content_only(facade: Harness) -> None:
    body = await both(facade, stop=["ou", "Two"])
    assert message_of(body)["reasoning"] == THOUGHT and message_of(body)["content"] == "F"
    assert body["choices"][0]["stop_reason"] == "ou"


async def test_calls_are_looked_for_in_the_content_only(facade: Harness) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
    facade.say(f"<think>{call % 1}</think>{call % 2}", chunk_sizes=3)
    status, body, _ = await facade.post(CHAT, chat(tools=[ADD]))
    assert status == 200, body
    message = message_of(body)
    assert message["reasoning"] == call % 1 and message["content"] is None
    (made,) = message["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 2}
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_constraint_begins_behind_the_thought(facade: Harness) -> None:
    facade.say('Two.</think>{"a": 1}')
    fields = {"chat_template_kwargs": {"opens_thought": True}}
    body = await both(facade, response_format={"type": "json_object"}, **fields)
    message = message_of(body)
    assert (message["reasoning"], message["content"]) == ("Two.", '{"a": 1}')
    assert [one["type"] for one in tag_format(facade)["elements"]] == ["sequence", "json_schema"]

    facade.reset()
    facade.say('{"a": 1}')
    body = await both(facade, response_format={"type": "json_object"})  # it may think, or not
    assert message_of(body)["content"] == '{"a": 1}' and "reasoning" not in message_of(body)
    assert [one["type"] for one in tag_format(facade)["elements"]] == ["optional", "json_schema"]

    facade.reset()
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    body = await both(facade, response_format={"type": "json_object"}, **closed)
    assert message_of(body)["content"] == '{"a": 1}'
    asked = facade.fake.calls[0].request.structured_output
    assert asked is not None and asked.json_object and asked.structural_tag is None


async def test_forced_calls_begin_behind_the_thought(facade: Harness) -> None:
    facade.say('<think>Add.</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    status, body, _ = await facade.post(CHAT, chat(tools=[ADD], tool_choice="required"))
    assert status == 200, body
    message = message_of(body)
    assert message["reasoning"] == "Add." and message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "add"
    assert tag_format(facade)["elements"][0]["type"] == "optional"


def tag_format(facade: Harness) -> dict[str, Any]:
    """Of the structural tag that the engine was asked for."""
    asked = facade.fake.calls[0].request.structured_output
    assert asked is not None and asked.structural_tag is not None
    found: dict[str, Any] = json.loads(asked.structural_tag)["format"]
    return found


async def test_what_is_wrong_with_a_constraint_is_named_in_the_callers_own_fields(
    facade: Harness,
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    params = "response_format.json_schema.schema"
    for fields, place, param in (
        ({"response_format": schema}, ".json_schema.properties.a", f"{params}.properties.a"),
        ({"regex": "a("}, ".pattern", "regex"),
        (
            {"tools": [ADD], "tool_choice": "required"},
            ".tags[0].content.json_schema.minItems",
            "tools[0].function.parameters.minItems",
        ),
    ):
        where = f"$.format.elements[1]{place}: why"
        violation = FieldViolation("structured_output.structural_tag", where)
        facade.fake.script(Script.failing(InvalidRequest("bad", field_violations=(violation,))))
        status, body, _ = await facade.post(CHAT, chat(**fields))
        assert check_envelope(status, body, 400, param)["message"] == f"{param}: why"


async def test_the_thought_can_be_left_out(facade: Harness) -> None:
    body = await both(facade, include_reasoning=False)
    assert message_of(body)["content"] == "Four." and "reasoning" not in message_of(body)
    assert reasoning_tokens(body) > 0


async def test_a_thought_that_is_not_shown_leaves_no_silence(thinking_model_dir: Path) -> None:
    async with facade_and_fake(thinking_model_dir, sse_keepalive_seconds=0.2) as facade:
        facade.say(THINKING, delay_seconds=0.05)
        answer = await facade.stream(CHAT, chat(include_reasoning=False))
        assert answer.text() == "Four."
        assert answer.raw.count(b": keep-alive") >= 2


async def test_logprobs_describe_the_thought_and_its_tags_too(facade: Harness) -> None:
    status, body, _ = await facade.post(CHAT, chat(logprobs=True))
    assert status == 200, body
    entries = body["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text.removesuffix("<|im_end|>") == THINKING


async def test_thoughts_of_earlier_turns_go_to_the_template(facade: Harness) -> None:
    for name in ("reasoning_content", "reasoning"):
        facade.reset()
        answer = {"role": "assistant", "content": "Four.", name: "Two and two."}
        history = [{"role": "user", "content": "2 + 2?"}, answer, {"role": "user", "content": "?"}]
        status, body, headers = await facade.post(CHAT, chat(messages=history))
        assert status == 200, body
        assert "x-ignored-params" not in headers
        prompt = facade.tok.decode(prompt_ids(facade.fake.calls[0].request.prompt))
        assert "<think>\nTwo and two.\n</think>\n\nFour." in prompt


async def test_completions_have_no_thoughts(facade: Harness) -> None:
    status, body, _ = await facade.post(COMPLETIONS, completion())
    assert status == 200, body
    assert body["choices"][0]["text"] == THINKING
