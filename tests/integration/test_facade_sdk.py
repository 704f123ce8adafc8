"""The official SDK against the facade: answers it can read, and its own exceptions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

from access.keys import plain_keys
from clients.errors import (
    ContextLengthExceeded,
    EngineClientError,
    EngineUnavailable,
    InternalError,
    OutOfMemory,
    QueueFull,
)
from clients.testing import Accept, Fail, Progress, Script
from http_facade.edge import EdgeConfig
from tests.facade_harness import MODEL, Harness, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "secret-key"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    edge = EdgeConfig(api_keys=plain_keys([KEY]))
    async with facade_and_fake(embedded_model_dir, edge=edge) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("Hello from the engine")
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(facade: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=facade.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_chat(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == "Hello from the engine"
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id == answer.id


async def test_chat_stream(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello from the engine"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


async def test_the_streaming_helper_accumulates_the_same_answer(sdk: AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}]
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello from the engine"


async def test_tool_calls_of_the_streaming_helper(facade: Harness, sdk: AsyncOpenAI) -> None:
    calls = [
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>'
        for a in (1, 3)
    ]
    facade.say("Let me add.\n" + "\n".join(calls), chunk_sizes=2)
    add: ChatCompletionToolParam = {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    async with sdk.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "1 + 2?"}], tools=[add]
    ) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me add.", "tool_calls")
    assert choice.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [
        {"a": 1, "b": 2},
        {"a": 3, "b": 2},
    ]


async def test_completions(sdk: AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello from the engine"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    stream = await sdk.completions.create(model=MODEL, prompt="a", stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == "Hello from the engine"


async def test_models(sdk: AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("nothing")


async def ask(sdk: AsyncOpenAI, model: str = MODEL, **fields: object) -> None:
    await sdk.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], extra_body=fields
    )


async def test_errors_made_here(facade: Harness, sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await ask(sdk, temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(sdk, model="nothing")
    assert missing.value.code == "model_not_found"
    async with sdk.with_options(api_key="wrong") as other:
        with pytest.raises(openai.AuthenticationError) as denied:
            await ask(other)
        assert denied.value.code == "invalid_api_key"
    assert facade.fake.calls == []


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (ContextLengthExceeded("9 of 8"), openai.BadRequestError, "context_length_exceeded"),
        (QueueFull("full", retry_after_seconds=1), openai.RateLimitError, "queue_full"),
        (EngineUnavailable("draining", retry_after_seconds=9), openai.InternalServerError,
         "engine_unavailable"),
        (OutOfMemory("none left"), openai.InternalServerError, "out_of_memory"),
        (InternalError("boom"), openai.InternalServerError, "internal_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_errors_of_the_engine(
    facade: Harness,
    sdk: AsyncOpenAI,
    error: EngineClientError,
    expected: type[openai.APIStatusError],
    code: str,
) -> None:
    facade.fake.script(Script.failing(error))
    with pytest.raises(expected) as caught:
        await ask(sdk)
    assert caught.value.code == code
    assert caught.value.request_id


async def test_a_failure_in_mid_stream_raises(facade: Harness, sdk: AsyncOpenAI) -> None:
    steps = Script.of_tokens(facade.tok.encode("one two")).steps[:-1]
    facade.fake.script(Script((*steps, Fail(OutOfMemory("none left")))))
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    received: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            received.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="none left"):
        await read()
    assert "".join(received) == "one two"


async def test_an_overload_is_tried_again_only_after_its_hint(
    facade: Harness, sdk: AsyncOpenAI
) -> None:
    full = Script.failing(QueueFull("full", retry_after_seconds=0.7))
    facade.fake.script(full, Script((Accept(), Progress(), *Script.of_tokens([504]).steps[2:])))
    began = time.monotonic()
    await ask(sdk.with_options(max_retries=2))
    assert time.monotonic() - began >= 0.7
    assert len(facade.fake.calls) == 2
