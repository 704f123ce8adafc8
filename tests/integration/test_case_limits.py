"""CASES V2, V3, V4, V8 and bad input on the real server: one envelope, right status, the field."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import aiohttp
import pytest

from tests.serving import Served, post, stream, wait_idle

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello."}]


def body_for(path: str, served: Served, **fields: Any) -> dict[str, Any]:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    return {"model": served.model, "temperature": 0, "max_tokens": 5, **start, **fields}


def check_envelope(status: int, body: dict[str, Any], expected: int, param: str | None) -> None:
    assert status == expected, body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    for leak in ("Traceback", "/site-packages/", "<class", "object at 0x"):
        assert leak not in error["message"]
    if param is not None:
        assert error["param"] == param


NULLABLE = [
    "temperature",
    "top_p",
    "max_tokens",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "logprobs",
    "stream",
    "stream_options",
    "presence_penalty",
    "frequency_penalty",
    "user",
]
CHAT_NULLABLE = ["max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format"]
COMPLETIONS_NULLABLE = ["echo", "suffix", "best_of"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, NULLABLE + CHAT_NULLABLE), (COMPLETIONS, NULLABLE + COMPLETIONS_NULLABLE)],
)
async def test_v2_null_means_absent(served: Served, path: str, fields: list[str]) -> None:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    bare = {"model": served.model, **start, "temperature": 0, "max_tokens": 8}
    nulls = {**bare, **dict.fromkeys(set(fields) - {"temperature", "max_tokens"})}
    (status, body, _), (plain_status, plain, _) = await asyncio.gather(
        post(served.http, path, nulls), post(served.http, path, bare)
    )
    assert (status, plain_status) == (200, 200), body
    assert body["choices"] == plain["choices"]
    for field in ("temperature", "max_tokens"):
        cut = {**bare, field: None, "seed": 1, "stop": "."}
        status, body, _ = await post(served.http, path, cut)
        assert status == 200, body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_v2_null_for_a_required_field_is_refused(served: Served, path: str) -> None:
    required = "messages" if path == CHAT else "prompt"
    for field in ("model", required):
        status, body, _ = await post(served.http, path, body_for(path, served, **{field: None}))
        check_envelope(status, body, 400, field)
    bad = body_for(CHAT, served, messages=[{"role": None, "content": "x"}])
    status, body, _ = await post(served.http, CHAT, bad)
    check_envelope(status, body, 400, "messages[0].role")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_v2_an_unknown_field_is_named(served: Served, path: str) -> None:
    status, _, headers = await post(served.http, path, body_for(path, served, no_such_field=1))
    assert status == 200
    assert "no_such_field" in headers["x-ignored-params"]


BAD_VALUES: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, 1.5, "8", True)),
    *(("n", value) for value in (0, -1, 10**6)),
    *(("stop", value) for value in ("", [""], ["x"] * 10_000, 7)),
    *(("temperature", value) for value in (2.1, -0.1, "0.5", True)),
    *(("top_p", value) for value in (1.1, -0.5, 0)),
    *(("top_k", value) for value in (-2, 1.5)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"x": 1}),
    ("seed", "x"),
    ("stream", "yes"),
    ("stop_token_ids", [-1]),
    ("stream_options", {"include_usage": True}),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_v3_values_out_of_range_are_named(served: Served, path: str) -> None:
    waits: list[float] = []
    for field, value in BAD_VALUES:
        began = time.monotonic()
        status, body, _ = await post(served.http, path, body_for(path, served, **{field: value}))
        check_envelope(status, body, 400, None)
        assert (body["error"]["param"] or "").startswith(field), (field, value, body)
        waits.append(time.monotonic() - began)
    assert statistics.median(waits) < 1.0
    for raw in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        data = json.dumps(body_for(path, served, temperature=12345)).encode()
        status, body, _ = await post(served.http, path, data.replace(b"12345", raw))
        check_envelope(status, body, 400, None)


async def test_v3_limits_with_their_neighbours(served: Served) -> None:
    async def refused(path: str, param: str, **fields: Any) -> None:
        status, body, _ = await post(served.http, path, body_for(path, served, **fields))
        check_envelope(status, body, 400, param)

    await refused(CHAT, "top_logprobs", logprobs=True, top_logprobs=21)
    await refused(CHAT, "top_logprobs", top_logprobs=2)
    await refused(COMPLETIONS, "best_of", n=2, best_of=1)
    bad_stream = await stream(served.http, CHAT, body_for(CHAT, served, n=0))
    assert bad_stream.status == 400

    three = body_for(CHAT, served, max_completion_tokens=3)
    del three["max_tokens"]
    status, body, _ = await post(served.http, CHAT, three)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    status, body, _ = await post(
        served.http, CHAT, body_for(CHAT, served, max_completion_tokens=3, max_tokens=10)
    )
    check_envelope(status, body, 400, None)


async def test_v3_the_edge_of_the_context(served: Served) -> None:
    _, models, _ = await get(served, "/v1/models")
    context = models["data"][0]["max_model_len"]
    assert context == 8192
    for length in (context, context + 1):
        body = body_for(COMPLETIONS, served, prompt=[5] * length)
        status, answer, _ = await post(served.http, COMPLETIONS, body)
        check_envelope(status, answer, 400, None)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert str(length) in answer["error"]["message"]
        assert str(context) in answer["error"]["message"]
    body = body_for(COMPLETIONS, served, prompt=[5] * 40, max_tokens=10**9, stop="\n")
    body["logit_bias"] = {"2": 100}
    status, answer, _ = await post(served.http, COMPLETIONS, body)
    assert status == 200, answer  # clamped to what is left of the context


async def get(served: Served, path: str) -> tuple[int, dict[str, Any], str]:
    async with aiohttp.ClientSession() as session, session.get(served.http + path) as answer:
        return answer.status, await answer.json(), answer.content_type


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_v4_one_envelope_for_everything(served: Served, path: str) -> None:
    good = body_for(path, served)
    for raw in (b"{broken", json.dumps(good).encode()[:-5], b"[]", b"", b"7", b"\xff\xfe", b"null"):
        status, body, headers = await post(served.http, path, raw)
        check_envelope(status, body, 400, None)
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"]
    status, body, _ = await post(
        served.http, path, json.dumps(good).encode(), {"content-type": "text/plain"}
    )
    check_envelope(status, body, 415, None)
    status, body, _ = await post(served.http, path, {**good, "model": "no-such-model"})
    check_envelope(status, body, 404, "model")
    assert body["error"]["code"] == "model_not_found"
    del good["model"]
    status, body, _ = await post(served.http, path, good)
    check_envelope(status, body, 400, "model")
    status, body, _ = await get(served, path)
    check_envelope(status, body, 405, None)
    status, body, _ = await get(served, "/v1/no/such/path")
    check_envelope(status, body, 404, None)


async def test_v4_messages_of_wrong_shape(served: Served) -> None:
    cases: list[tuple[Any, str]] = [
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
    ]
    for messages, param in cases:
        bad = body_for(CHAT, served, messages=messages)
        status, body, _ = await post(served.http, CHAT, bad)
        check_envelope(status, body, 400, param)


async def test_v8_content_parts(served: Served) -> None:
    async def ask(content: Any, role: str = "user") -> tuple[int, dict[str, Any]]:
        messages = [{"role": role, "content": content}, *HELLO]
        status, body, _ = await post(served.http, CHAT, body_for(CHAT, served, messages=messages))
        return status, body

    for role in ("system", "user", "assistant"):
        status, plain = await ask("Hello", role)
        assert status == 200, plain
        for parts in (
            [{"type": "text", "text": "Hello"}],
            [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        ):
            status, body = await ask(parts, role)
            assert status == 200, body
            assert body["choices"] == plain["choices"]
            assert body["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    bad_contents: list[Any] = [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}],
        [{"type": "text"}],
        ["Hello"],
        [{"type": "text", "text": None}],
        5,
    ]
    for bad in bad_contents:
        status, body = await ask(bad)
        check_envelope(status, body, 400, None)
        assert body["error"]["param"].startswith("messages[0].content"), body


BAD_SCHEMAS: list[Any] = [
    "x",
    [],
    7,
    {"type": "notatype"},
    {"type": "object", "properties": []},
    {"$ref": "#/$defs/none"},
    {"type": "string", "pattern": "(["},
    {"type": "array", "minItems": 3, "maxItems": 1},
]
BAD_FORMATS: list[Any] = [
    "json",
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": "s"},
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": bad}} for bad in BAD_SCHEMAS),
]


@pytest.mark.parametrize("response_format", BAD_FORMATS, ids=str)
async def test_a_bad_schema_is_refused_at_the_door(served: Served, response_format: Any) -> None:
    body = body_for(CHAT, served, response_format=response_format)
    status, answer, _ = await post(served.http, CHAT, body)
    check_envelope(status, answer, 400, None)
    assert (answer["error"]["param"] or "").startswith("response_format"), answer
    streamed = await stream(served.http, CHAT, body)
    assert streamed.status == 400
    await wait_idle(served, 2)
