"""CASES S1, S2, S5 on the real server: how streams end, usage, and the last delta."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.serving import Served, post, stream

ENUM_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"v": {"type": "string", "enum": ["yes"]}},
            "required": ["v"],
            "additionalProperties": False,
        },
    },
}


def body_for(endpoint: str, served: Served, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": served.model, "temperature": 0, **fields}
    if endpoint == "chat/completions":
        body["messages"] = [{"role": "user", "content": "Count to ten."}]
    else:
        body["prompt"] = "One, two, three,"
    return body


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    ("ending", "reason"),
    [("eos", "stop"), ("length", "length"), ("stop_string", "stop"), ("schema", "stop")],
)
async def test_s1_every_stream_ends_once(
    served: Served,
    tok: PreTrainedTokenizerBase,
    endpoint: str,
    logprobs: bool,
    ending: str,
    reason: str,
) -> None:
    fields: dict[str, Any] = {"max_tokens": 12}
    if ending == "eos":
        fields["logit_bias"] = {str(tok.eos_token_id): 100}
    elif ending == "stop_string":
        plain = await stream(
            served.http, f"/v1/{endpoint}", body_for(endpoint, served, max_tokens=12)
        )
        fields["stop"] = plain.text()[4:8]
    elif ending == "schema":
        fields |= {"response_format": ENUM_SCHEMA, "max_tokens": 40}
    if logprobs:
        fields |= (
            {"logprobs": True, "top_logprobs": 2}
            if endpoint == "chat/completions"
            else {"logprobs": 2}
        )
    body = body_for(endpoint, served, **fields)

    answer = await stream(served.http, f"/v1/{endpoint}", body)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.finish_reasons() == [reason]
    assert all("finish_reason" in chunk for chunk in answer.choice_chunks())
    assert answer.num_done == 1
    assert answer.raw.endswith(b"data: [DONE]\n\n") and answer.after_done == b""

    status, twin, _ = await post(served.http, f"/v1/{endpoint}", body)
    assert status == 200
    choice = twin["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert (text, choice["finish_reason"]) == (answer.text(), reason)


async def test_s2_usage_only_when_asked_and_true(served: Served) -> None:
    body = body_for("chat/completions", served, max_tokens=24)
    path = "/v1/chat/completions"
    _, plain, _ = await post(served.http, path, body)

    asked = await stream(served.http, path, {**body, "stream_options": {"include_usage": True}})
    last = asked.events[-1]
    assert last["choices"] == []
    cached = "prompt_tokens_details"  # the second run may hit the prefix cache
    assert {k: v for k, v in last["usage"].items() if k != cached} == {
        k: v for k, v in plain["usage"].items() if k != cached
    }
    assert last["usage"]["total_tokens"] == (
        last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    )
    assert all(event.get("usage") is None for event in asked.events[:-1])

    for options in (None, {"include_usage": False}):
        quiet = await stream(served.http, path, {**body, "stream_options": options})
        assert quiet.usage() is None
        assert all(event["choices"] for event in quiet.events)

    running = await stream(
        served.http,
        path,
        {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    totals = [event["usage"]["completion_tokens"] for event in running.events]
    assert totals == sorted(totals)
    assert totals[-1] == plain["usage"]["completion_tokens"]
    contents = [
        event["usage"]["completion_tokens"]
        for event in running.events
        if event["choices"] and event["choices"][0]["delta"].get("content")
    ]
    assert contents[-1] == totals[-1]


async def test_s5_no_last_delta_is_lost(served: Served) -> None:
    limit = asyncio.Semaphore(16)

    async def both(number: int) -> tuple[str, str, int]:
        body = {
            "model": served.model,
            "prompt": f"{number} plus {number} makes",
            "max_tokens": 1 + number % 5,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with limit:
            streamed = await stream(served.http, "/v1/completions", body)
            _, whole, _ = await post(served.http, "/v1/completions", body)
        return streamed.text(), whole["choices"][0]["text"], whole["usage"]["completion_tokens"]

    results = await asyncio.gather(*(both(number) for number in range(100)))
    different = [number for number, (a, b, _) in enumerate(results) if a != b]
    assert len(different) <= 1, different  # near-ties (L7)
    assert [count for *_, count in results] == [1 + number % 5 for number in range(100)]
    assert all(streamed for streamed, *_ in results)
