"""Tool calls over HTTP, with an engine that says exactly what the test wants (T1, T3, T5)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clients.errors import FieldViolation, InvalidRequest
from clients.testing import Accept, Finish, Script
from clients.types import FinishReason
from tests.facade_harness import CHAT, Harness, chat, check_envelope, facade_and_fake, prompt_ids
from tests.serving import Stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "Hi"}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [function("first", parameters=NUMBER), function("second", description="Says when")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    return shared


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def streamed_message(answer: Stream) -> dict[str, Any]:
    """The deltas added up as an SDK does it, checked on the way."""
    content = ""
    calls: list[dict[str, Any]] = []
    for choice in answer.choice_chunks():
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):  # the first of its call
                assert delta["id"] and delta["type"] == "function"
                calls.append({key: value for key, value in delta.items() if key != "index"})
                continue
            assert delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"}
            assert delta["index"] == len(calls) - 1
            function = calls[-1]["function"]
            function["arguments"] += delta["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls}


async def both(facade: Harness, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish reason, the same in a stream and in one piece."""
    status, body, _ = await facade.post(CHAT, chat(**fields))
    assert status == 200, body
    (choice,) = body["choices"]
    streamed = await facade.stream(CHAT, chat(**fields))
    assert streamed.finish_reasons() == [choice["finish_reason"]]
    message = choice["message"]
    parts = streamed_message(streamed)
    assert parts["content"] == (message["content"] or None)
    assert without_ids(parts["tool_calls"]) == without_ids(message.get("tool_calls", []))
    return message, choice["finish_reason"]


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


def functions(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


# ---------------------------------------------------------------- answers (T1, T3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize(
    "arguments", ["{}", '{"n": 42}', '{"f": [true, null]}', '{"o":{"a":{"b":1}}}', '{"s":"a\\"}]"}']
)
async def test_t1_streamed_arguments_add_up(facade: Harness, chunk: int, arguments: str) -> None:
    facade.say(call("first", arguments), chunk_sizes=chunk)
    message, reason = await both(facade, tools=TOOLS, tool_choice=function("first"))
    assert functions(message) == [("first", arguments)]
    assert message["content"] is None and reason == "stop"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
async def test_t3_calls_are_told_apart(facade: Harness, chunk: int) -> None:
    text = call("second", "{}") + "\n" + call("first", '{"n": 1}')
    facade.say(text, chunk_sizes=chunk)
    message, reason = await both(facade, tools=TOOLS, parallel_tool_calls=True)
    assert functions(message) == [("second", "{}"), ("first", '{"n": 1}')]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(ids)
    assert message["content"] is None and reason == "tool_calls"
    message, reason = await both(facade, tools=TOOLS, parallel_tool_calls=False)
    assert functions(message) == [("second", "{}")]
    assert reason == "tool_calls"


async def test_content_beside_calls_is_kept(facade: Harness) -> None:
    facade.say("Let me look.\n" + call("first", '{"n": 1}'), chunk_sizes=1)
    message, reason = await both(facade, tools=TOOLS)
    assert message["content"] == "Let me look."
    assert functions(message) == [("first", '{"n": 1}')]
    assert reason == "tool_calls"


async def test_an_answer_without_calls_is_as_it_was(facade: Harness) -> None:
    facade.say("1 < 2, <tool> and {so} on", chunk_sizes=1)
    message, reason = await both(facade, tools=TOOLS)
    assert message == {
        "role": "assistant", "content": "1 < 2, <tool> and {so} on", "refusal": None
    }  # fmt: skip
    assert reason == "stop"


async def test_without_tools_nothing_is_looked_for(facade: Harness) -> None:
    text = call("first", "{}")
    facade.say(text)
    choices: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in choices:
        message, _ = await both(facade, **fields)
        assert message["content"] == text and "tool_calls" not in message
        assert facade.fake.requests[-1].structured_output is None


async def test_a_call_that_is_cut_off_says_so(facade: Harness) -> None:
    ids = facade.tok.encode('<tool_call>\n{"name": "first", "arguments": {"n": 12345678')
    facade.fake.script(Script((*Script.of_tokens(ids).steps[:-1], Finish(FinishReason.LENGTH))))
    message, reason = await both(facade, tools=TOOLS, tool_choice="required")
    assert functions(message) == [("first", '{"n": 12345678')]
    assert reason == "length"


async def test_a_call_that_is_cut_before_its_name_is_content_unless_calls_are_forced(
    facade: Harness,
) -> None:
    text = '<tool_call>\n{"name": "fi'
    facade.fake.script(
        Script((*Script.of_tokens(facade.tok.encode(text)).steps[:-1], Finish(FinishReason.LENGTH)))
    )
    message, reason = await both(facade, tools=TOOLS)
    assert (message["content"], reason) == (text, "length")
    message, reason = await both(facade, tools=TOOLS, tool_choice="required")
    assert (message["content"], reason) == ("", "length")
    assert "tool_calls" not in message


async def test_stop_strings_look_at_the_text_of_calls_too(facade: Harness) -> None:
    facade.say(call("first", '{"n": 1, "m": 2}'), chunk_sizes=1)
    message, reason = await both(facade, tools=TOOLS, stop='"m"')
    assert functions(message) == [("first", '{"n": 1, ')]
    assert reason == "stop"


async def test_logprobs_and_token_ids_tell_of_calls_too(facade: Harness) -> None:
    ids = facade.say(call("first", '{"n": 1}'), chunk_sizes=1)
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    _, body, _ = await facade.post(CHAT, chat(**fields))
    (choice,) = body["choices"]
    assert choice["token_ids"][: len(ids)] == ids
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"][: len(ids)]) == (
        call("first", '{"n": 1}')
    )
    streamed = await facade.stream(CHAT, chat(**fields))
    chunks = streamed.choice_chunks()
    assert [i for chunk in chunks for i in chunk.get("token_ids", ())] == choice["token_ids"]
    entries = [e for chunk in chunks for e in (chunk["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]


async def test_samples_have_calls_of_their_own(facade: Harness) -> None:
    one, two = (facade.tok.encode(call("first", f'{{"n": {n}}}')) for n in (1, 2))
    facade.fake.script(Script.of_samples((one, two), chunk_sizes=3))
    _, body, _ = await facade.post(CHAT, chat(tools=TOOLS, n=2))
    messages = [choice["message"] for choice in body["choices"]]
    assert [functions(message) for message in messages] == [
        [("first", '{"n": 1}')],
        [("first", '{"n": 2}')],
    ]
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 2


# ---------------------------------------------------------------- what the engine is asked for


async def test_the_engine_gets_a_structural_tag(facade: Harness) -> None:
    facade.say("fine")
    await facade.post(CHAT, chat(tools=TOOLS))
    output = facade.fake.requests[-1].structured_output
    assert output is not None and not output.relax_unenforced
    tag = json.loads(output.structural_tag or "")["format"]
    assert [one["begin"] for one in tag["tags"]] == [
        '<tool_call>\n{"name": "first", "arguments": ',
        '<tool_call>\n{"name": "second", "arguments": ',
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_relaxed_is_named(facade: Harness, stream: bool) -> None:
    relaxed = (
        "$.format.tags[0].content.json_schema.properties.n.multipleOf",
        "$.format.tags[1].content.json_schema.not",
    )
    steps = Script.of_tokens(facade.tok.encode("fine")).steps
    facade.fake.script(Script((Accept(relaxed=relaxed), *steps[1:])))
    body = chat(tools=TOOLS, no_such=1)
    if stream:
        headers = (await facade.stream(CHAT, body)).headers
    else:
        _, _, headers = await facade.post(CHAT, body)
    assert headers["x-ignored-params"] == (
        "no_such, tools[0].function.parameters.properties.n.multipleOf, "
        "tools[1].function.parameters.not"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_schema_is_the_tools(facade: Harness, stream: bool) -> None:
    said = "$.format.tags[1].content.json_schema.properties.a: not is not enforced"
    violation = FieldViolation("structured_output.structural_tag", said)
    error = InvalidRequest("bad", field_violations=(violation,))
    facade.fake.script(Script.failing(error))
    status, body, _ = await facade.post(CHAT, chat(tools=TOOLS, stream=stream))
    found = check_envelope(status, body, 400, "tools[1].function.parameters.properties.a")
    assert "not is not enforced" in found["message"]


# ---------------------------------------------------------------- prompts and history (T5)


async def prompt_of(facade: Harness, messages: list[Any], **fields: Any) -> str:
    facade.say("fine")
    status, body, _ = await facade.post(CHAT, chat(messages=messages, **fields))
    assert status == 200, body
    return facade.tok.decode(prompt_ids(facade.fake.requests[-1].prompt), skip_special_tokens=False)


async def test_a_template_without_tools_gets_them_as_text(facade: Harness) -> None:
    prompt = await prompt_of(facade, [USER], tools=TOOLS)
    assert prompt.startswith("<|im_start|>system\nYou can call functions.")
    for said in ('{"name": "first", "parameters"', '"description": "Says when"', "<tool_call>"):
        assert said in prompt
    merged = await prompt_of(facade, [{"role": "system", "content": "Be kind."}, USER], tools=TOOLS)
    assert merged.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert merged.count("<|im_start|>system") == 1
    plain = await prompt_of(facade, [USER], tools=TOOLS, tool_choice="none")
    assert plain == await prompt_of(facade, [USER])


HISTORY_CALL = {
    "id": "call_1", "type": "function", "function": {"name": "first", "arguments": '{"a": 1}'}
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "15C"}


async def test_t5_history_round_trips(facade: Harness) -> None:
    def history(assistant: dict[str, Any], result: dict[str, Any] = RESULT) -> list[Any]:
        return [USER, {"role": "assistant", **assistant}, result, USER]

    calls = {"tool_calls": [HISTORY_CALL]}
    prompt = await prompt_of(facade, history({"content": None, **calls}), tools=TOOLS)
    assert call("first", '{"a": 1}') in prompt
    assert "<|im_start|>user\n<tool_response>\n15C\n</tool_response><|im_end|>" in prompt
    for same in (calls, {"content": "", **calls}):
        assert await prompt_of(facade, history(same), tools=TOOLS) == prompt
    parts = {**RESULT, "content": [{"type": "text", "text": "15C"}]}
    assert await prompt_of(facade, history(calls, parts), tools=TOOLS) == prompt
    unknown = {**RESULT, "tool_call_id": "call_9"}
    assert await prompt_of(facade, history(calls, unknown), tools=TOOLS) == prompt
    with_text = await prompt_of(facade, history({"content": "Look:", **calls}), tools=TOOLS)
    assert "Look:\n<tool_call>" in with_text
    empty = await prompt_of(facade, [USER, {"role": "assistant", "content": "x", "tool_calls": []}])
    assert empty == await prompt_of(facade, [USER, {"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("given", "shown"),
    [("", "{}"), ("not JSON", '"not JSON"'), ("[1]", '"[1]"'), ('{"é":1}', '{"é": 1}')],
)
async def test_t5_arguments_that_are_no_object_are_text(
    facade: Harness, given: str, shown: str
) -> None:
    one = {**HISTORY_CALL, "function": {"name": "first", "arguments": given}}
    prompt = await prompt_of(facade, [USER, {"role": "assistant", "tool_calls": [one]}, USER])
    assert call("first", shown) in prompt


async def test_t5_results_that_follow_each_other_are_one_message(facade: Harness) -> None:
    twice = [HISTORY_CALL, {**HISTORY_CALL, "id": "call_2"}]
    messages = [USER, {"role": "assistant", "tool_calls": twice}, RESULT, RESULT]
    prompt = await prompt_of(facade, messages)
    assert prompt.count("<|im_start|>user") == 2
    assert prompt.count("<tool_response>\n15C\n</tool_response>") == 2


async def test_the_format_can_be_set(embedded_model_dir: Path) -> None:
    async with facade_and_fake(embedded_model_dir, tool_call_parser="mistral") as other:
        other.say('[TOOL_CALLS] [{"name": "first", "arguments": {"n": 1}}]', chunk_sizes=1)
        message, reason = await both(other, tools=TOOLS)
        assert (functions(message), reason) == ([("first", '{"n": 1}')], "tool_calls")
        assert len(message["tool_calls"][0]["id"]) == 9
        prompt = other.tok.decode(prompt_ids(other.fake.requests[-1].prompt))
        assert '[TOOL_CALLS] [{"name": "NAME"' in prompt
