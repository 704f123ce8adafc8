"""The official SDK, as its users write it, against the real server with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.serving import Served

pytestmark = pytest.mark.slow

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


class City(BaseModel):
    name: Literal["Paris", "London"]
    is_large: bool
    is_capital: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris"]
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.http + "/v1", api_key="none needed", max_retries=0) as client:
        yield client


def test_chat(sdk: OpenAI, served: Served) -> None:
    answer = sdk.chat.completions.create(
        model=served.model, messages=QUESTION, temperature=0, max_completion_tokens=16
    )
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.message.role == "assistant" and choice.message.refusal is None
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert (answer.system_fingerprint or "").startswith("fp_")


def test_streaming_says_what_the_whole_answer_says(sdk: OpenAI, served: Served) -> None:
    whole = sdk.chat.completions.create(
        model=served.model, messages=QUESTION, temperature=0, max_tokens=16
    )
    stream = sdk.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_streaming_helper(sdk: OpenAI, served: Served) -> None:
    with sdk.chat.completions.stream(
        model=served.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        stop=[" "],  # the helper raises for an answer that is cut
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_parse_returns_the_pydantic_model(sdk: OpenAI, served: Served) -> None:
    answer = sdk.chat.completions.parse(
        model=served.model, messages=QUESTION, temperature=0, max_tokens=64, response_format=City
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert answer.choices[0].finish_reason == "stop"
    with sdk.chat.completions.stream(
        model=served.model, messages=QUESTION, temperature=0, max_tokens=64, response_format=City
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


def test_parse_says_when_the_answer_was_cut(sdk: OpenAI, served: Served) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model=served.model, messages=QUESTION, max_tokens=3, response_format=City
        )


@pytest.mark.parametrize("choice", ["required", "named"])
def test_tools(sdk: OpenAI, served: Served, choice: str) -> None:
    answer = sdk.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        temperature=0,
        max_tokens=64,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required"
        if choice == "required"
        else {"type": "function", "function": {"name": "GetWeather"}},
        parallel_tool_calls=False,
    )
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert call.id and json.loads(call.function.arguments)["city"] == "Paris"
    expected = "tool_calls" if choice == "required" else "stop"
    assert answer.choices[0].finish_reason == expected

    # and the result goes back, as the SDK's own types write it
    followed = sdk.chat.completions.create(
        model=served.model,
        messages=[
            {"role": "user", "content": "How is the weather in Paris?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "15C"},
        ],
        max_tokens=8,
    )
    assert followed.choices[0].message.content is not None


def test_logprobs_and_several_choices(sdk: OpenAI, served: Served) -> None:
    answer = sdk.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        n=3,
        seed=7,
        temperature=0.9,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
            assert entry.bytes is not None and entry.token
    assert answer.usage is not None and answer.usage.completion_tokens <= 18


def test_completions(sdk: OpenAI, served: Served) -> None:
    prompts = ["The capital of France is", "Two, three,"]
    answer = sdk.completions.create(
        model=served.model, prompt=prompts, max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt) and len(choice.text) > len(prompt)
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
        assert "".join(logprobs.tokens) == choice.text
    assert "Paris" in answer.choices[0].text
    stream = sdk.completions.create(
        model=served.model, prompt=prompts[0], max_tokens=4, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert prompts[0] + text == answer.choices[0].text


def test_models(sdk: OpenAI, served: Served) -> None:
    assert [model.id for model in sdk.models.list()] == [served.model]
    assert sdk.models.retrieve(served.model).id == served.model


# ---------------------------------------------------------------- errors that the engine finds


def test_a_prompt_beyond_the_context_is_said_with_both_numbers(sdk: OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens.* holds \d+") as caught:
        sdk.completions.create(model=served.model, prompt=[5] * 40_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_bad_schema_is_named_by_its_place(sdk: OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(
            model=served.model,
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "bad",
                    "schema": {"type": "object", "properties": {"a": {"type": "notatype"}}},
                },
            },
        )
    assert (caught.value.param or "").startswith("response_format.json_schema.schema.properties.a")


def test_a_deadline_ends_a_request_with_its_own_error(sdk: OpenAI, served: Served) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        sdk.with_options(max_retries=2).completions.create(
            model=served.model,
            prompt="Once",
            max_tokens=2000,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout": "0.5"},
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


def test_an_unknown_model_is_not_answered_by_another(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing") as caught:
        sdk.completions.create(model="nothing", prompt="Once")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
