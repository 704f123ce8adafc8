"""The public cases about tools and constrained answers, with the embedded model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.serving import Served, post, stream, wait_idle
from tests.text_samples import embedded_tokenizer

AGENT = Path(__file__).parents[2] / "docs" / "examples" / "agent.py"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is the weather in Paris?"}


def function(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> Any:
    definition = {"name": name, **fields} | (
        {} if parameters is None else {"parameters": parameters}
    )
    return {"type": "function", "function": definition}


def one_of(name: str, *values: object) -> dict[str, Any]:
    """A schema of objects with one property, which has one of these values."""
    return {
        "type": "object",
        "properties": {name: {"enum": list(values)}},
        "required": [name],
        "additionalProperties": False,
    }


def body(served: Served, **fields: Any) -> dict[str, Any]:
    return {"model": served.model, "messages": [USER], "max_tokens": 100, "seed": 7, **fields}


NESTED = {
    "type": "object",
    "properties": {
        "o": {
            "type": "object",
            "properties": {"a": one_of("b", 1)},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    "required": ["o"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, {}),
        ({"type": "object", "properties": {}, "additionalProperties": False}, {}),
        (one_of("n", 42), {"n": 42}),
        (one_of("f", [True, None]), {"f": [True, None]}),
        (NESTED, {"o": {"a": {"b": 1}}}),
        (one_of("s", 'a"}]'), {"s": 'a"}]'}),
    ],
    ids=json.dumps,
)
async def test_t1_arguments_in_a_stream_and_not(
    served: Served, parameters: dict[str, Any] | None, expected: object
) -> None:
    fields = body(served, tools=[function("f", parameters)], tool_choice=function("f"))
    status, whole, _ = await post(served.http, CHAT, fields)
    assert status == 200, whole
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == expected
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    streamed = await stream(served.http, CHAT, fields)
    deltas = [delta for c in streamed.choice_chunks() for delta in c["delta"].get("tool_calls", ())]
    assert deltas[0].keys() == {"index", "id", "type", "function"}
    joined = "".join(delta["function"]["arguments"] for delta in deltas)
    assert joined == call["function"]["arguments"]
    await wait_idle(served, 5)


CITIES = one_of("city", "Paris", "Rome")
TWO = [function("get_weather", CITIES), function("get_time", CITIES)]


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
async def test_t3_required_calls_are_whole_and_told_apart(served: Served, parallel: bool) -> None:
    fields = body(served, tools=TWO, tool_choice="required", parallel_tool_calls=parallel)
    for seed in range(4):
        streamed = await stream(served.http, CHAT, {**fields, "seed": seed, "temperature": 1.5})
        calls: dict[int, list[Any]] = {}
        for choice in streamed.choice_chunks():
            for delta in choice["delta"].get("tool_calls", ()):
                calls.setdefault(delta["index"], []).append(delta)
        assert list(calls) == list(range(len(calls))) and streamed.text() == ""
        assert len({deltas[0]["id"] for deltas in calls.values()}) == len(calls) >= 1
        (reason,) = streamed.finish_reasons()
        assert reason in ("tool_calls", "length") if parallel else reason == "tool_calls"
        assert parallel or len(calls) == 1
        for index, deltas in calls.items():
            assert deltas[0]["function"]["name"] in ("get_weather", "get_time")
            if reason == "tool_calls" or index < len(calls) - 1:
                arguments = "".join(delta["function"]["arguments"] for delta in deltas)
                assert json.loads(arguments)["city"] in ("Paris", "Rome")


def round_about(city: str) -> list[dict[str, Any]]:
    """A question that was answered with the help of a tool."""
    call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"in_{city}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"in_{city}", "content": "15C"},
        {"role": "assistant", "content": f"It is 15C in {city}."},
    ]


EXAMPLES = [message for city in ("Rome", "Oslo", "Bern") for message in round_about(city)]


async def test_auto_leaves_the_choice_to_the_model(served: Served) -> None:
    fields = body(served, tools=TWO, temperature=0)
    _, free, _ = await post(served.http, CHAT, fields)
    (choice,) = free["choices"]
    assert choice["message"]["content"] and choice["finish_reason"] == "stop"
    # After some examples it writes a call of its own accord, which is held to the schema then.
    _, led, _ = await post(served.http, CHAT, {**fields, "messages": [*EXAMPLES, USER]})
    (choice,) = led["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    for call in choice["message"]["tool_calls"]:
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


async def test_an_answer_is_calls_or_json(served: Served) -> None:
    schema = one_of("degrees", 15, 16)
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = body(served, tools=TWO, response_format=response_format, temperature=1.5)
    told = set()
    for seed in range(8):
        _, answer, _ = await post(served.http, CHAT, {**fields, "seed": seed})
        (choice,) = answer["choices"]
        told.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["degrees"] in (15, 16)
        else:
            assert choice["message"]["content"] is None and choice["message"]["tool_calls"]
    assert told <= {"stop", "tool_calls", "length"} and len(told) > 1, told


# ---------------------------------------------------------------- history (T5)


async def test_t5_history_costs_the_same_however_it_is_written(served: Served) -> None:
    user, assistant, tool, _ = round_about("Paris")

    async def prompt_tokens(*messages: dict[str, Any]) -> int:
        status, answer, _ = await post(
            served.http, CHAT, body(served, messages=[*messages, USER], max_tokens=1)
        )
        assert status == 200, answer
        tokens: int = answer["usage"]["prompt_tokens"]
        return tokens

    expected = await prompt_tokens(user, assistant, tool)
    without = {name: value for name, value in assistant.items() if name != "content"}
    assert await prompt_tokens(user, without, tool) == expected
    assert await prompt_tokens(user, {**assistant, "content": ""}, tool) == expected
    parts = [{"type": "text", "text": "15C"}]
    assert await prompt_tokens(user, assistant, {**tool, "content": parts}) == expected
    assert await prompt_tokens(user, assistant, {**tool, "tool_call_id": "other"}) == expected
    assert await prompt_tokens(user, assistant, {**tool, "content": "15C, dry"}) > expected


# ---------------------------------------------------------------- schemas (J2, J5, J7)


UNENFORCED = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}, "n": {"type": "integer", "not": {"const": 4}}},
    "required": ["city"],
}


async def test_strict_tools_refuse_what_can_not_be_enforced(served: Served) -> None:
    tools = [*TWO, function("f", UNENFORCED, strict=True)]
    for streams in (False, True):
        fields = body(served, tools=tools, stream=streams)
        status, answer, _ = await post(served.http, CHAT, fields)
        assert status == 400, answer
        param = answer["error"]["param"]
        assert param.startswith("tools[2].function.parameters.properties.n"), answer


async def test_other_tools_are_relaxed_and_say_so(served: Served) -> None:
    tools = [*TWO, function("f", UNENFORCED)]
    fields = body(served, tools=tools, tool_choice=function("f"))
    status, answer, headers = await post(served.http, CHAT, fields)
    assert status == 200, answer
    assert headers["x-ignored-params"] == "tools[2].function.parameters.properties.n.not"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"
    assert (await stream(served.http, CHAT, fields)).headers["x-ignored-params"]


async def test_j7_whitespace_can_not_run_away(served: Served, embedded_model_dir: Path) -> None:
    tokenizer = embedded_tokenizer(embedded_model_dir)
    spaces = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).isspace()]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
    bias = dict.fromkeys(map(str, spaces), 100)
    fields = body(served, tools=[function("f", schema)], tool_choice=function("f"), logit_bias=bias)
    _, answer, _ = await post(served.http, CHAT, {**fields, "max_tokens": 200})
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "stop" and "  " not in call["function"]["arguments"]
    assert answer["usage"]["completion_tokens"] < 100


# ---------------------------------------------------------------- an agent (issue D, 5)


def test_an_agent_calls_two_tools_over_three_turns(served: Served) -> None:
    agent = runpy.run_path(str(AGENT))
    with OpenAI(base_url=served.http + "/v1", api_key="none", max_retries=0) as client:
        messages = agent["run"](client, served.model, "What is the weather in Paris? And 2 + 3?")
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    results = [m for m in messages if m["role"] == "tool"]
    assert len(calls) == len(results) == agent["TURNS"]
    assert [m["tool_call_id"] for m in results] == [call["id"] for call in calls]
    for call in calls:
        assert call["function"]["name"] in agent["FUNCTIONS"]
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert messages[-1]["role"] == "assistant" and messages[-1]["content"]
