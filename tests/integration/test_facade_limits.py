"""CASES V2, V3, V4, V8, M4, J5 on a real socket: bad input has its status, envelope and field."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from clients.errors import (
    ContextLengthExceeded,
    EngineClientError,
    FieldViolation,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    QueueFull,
)
from clients.testing import Accept, Fail, Progress, Script
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    Harness,
    body_for,
    chat,
    check_envelope,
    completion,
    facade_and_fake,
    prompt_ids,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
MAX_BODY = 1_000_000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir, max_body_bytes=MAX_BODY) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("fine")
    return shared


@ENDPOINTS
async def test_v2_null_is_absent_and_unknown_fields_are_named(facade: Harness, path: str) -> None:
    names = "temperature top_p max_tokens n stop seed logit_bias logprobs stream stream_options"
    nulls = dict.fromkeys([*names.split(), "tools", "response_format", "user", "suffix", "echo"])
    status, whole, headers = await facade.post(path, body_for(path, **nulls))
    assert status == 200 and "x-ignored-params" not in headers
    _, plain, _ = await facade.post(path, body_for(path))
    assert whole["choices"] == plain["choices"]
    first, second = facade.fake.requests
    assert (first.sampling, first.stopping) == (second.sampling, second.stopping)
    for stream in (False, True):
        body = body_for(path, no_such=1, metadata={}, stream=stream)
        status, headers = await _status(facade, path, body)
        assert status == 200
        assert headers["x-ignored-params"] == "no_such, metadata"


async def _status(facade: Harness, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(facade.url + path, json=body) as answer,
    ):
        await answer.read()
        return answer.status, answer.headers


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
async def test_v3_bad_values_are_refused_before_the_engine_hears_of_them(
    facade: Harness, path: str, stream: bool
) -> None:
    for field, value in (
        ("max_tokens", 0),
        ("n", 0),
        ("n", 10**6),
        ("stop", [""]),
        ("temperature", 2.1),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tool_choice", "auto"),
    ):
        body = body_for(path, stream=stream, **{field: value})
        status, answer, _ = await facade.post(path, body)
        error = check_envelope(status, answer, 400)
        assert error["param"].startswith(field)
    assert facade.fake.calls == []


async def test_v3_the_edge_of_the_context(facade: Harness) -> None:
    context = facade.fake.model_info.max_model_len
    for length in (context, context + 1):
        status, answer, _ = await facade.post(COMPLETIONS, completion(prompt=[5] * length))
        error = check_envelope(status, answer, 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"] and str(context) in error["message"]
    status, _, _ = await facade.post(COMPLETIONS, completion(prompt=[5] * (context - 1)))
    assert status == 200
    status, answer, _ = await facade.post(
        CHAT, chat(messages=[{"role": "user", "content": "word " * context}])
    )
    error = check_envelope(status, answer, 400, "messages")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt"),
        ([49152], "prompt"),
        ([[5], [6, 49152]], "prompt[1]"),
        (["a"] * 1025, "prompt"),
    ],
)
async def test_prompts_that_cannot_be_taken(facade: Harness, prompt: Any, param: str) -> None:
    status, answer, _ = await facade.post(COMPLETIONS, completion(prompt=prompt))
    check_envelope(status, answer, 400, param)


@ENDPOINTS
async def test_m4_numbers_that_json_cannot_hold(facade: Harness, path: str) -> None:
    for field in ("temperature", "top_p", "presence_penalty"):
        good = json.dumps(body_for(path, **{field: 12345}))
        for raw in ("NaN", "Infinity", "-Infinity", "1e400"):
            data = good.replace("12345", raw).encode()
            status, answer, _ = await facade.post(path, data)
            check_envelope(status, answer, 400, field)
    for tiny in (0, 1e-6, 1e-4):
        status, _, _ = await facade.post(path, body_for(path, temperature=tiny))
        assert status == 200


@ENDPOINTS
async def test_v4_bodies_that_are_no_request(facade: Harness, path: str) -> None:
    good = json.dumps(body_for(path)).encode()
    deep = b'{"model": "fake", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for raw in (b"{broken", good[:-5], b"[]", b"", b"7", b"\xff\xfe", b"null", deep):
        status, answer, headers = await facade.post(path, raw)
        check_envelope(status, answer, 400)
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"]
    status, answer, _ = await facade.post(path, good, {"content-type": "text/plain"})
    check_envelope(status, answer, 415)
    status, answer, _ = await facade.post(
        path, good, {"content-type": "application/json; charset=utf-8"}
    )
    assert status == 200
    status, answer, _ = await facade.post(path, b'{"a": "' + b"x" * MAX_BODY + b'"}')
    check_envelope(status, answer, 413)
    # small on the wire, large once unpacked
    bomb = gzip.compress(b'{"a": "' + b"x" * (3 * MAX_BODY) + b'"}')
    status, answer, _ = await facade.post(path, bomb, {"content-encoding": "gzip"})
    check_envelope(status, answer, 413)
    status, answer, _ = await facade.post(path, b"no gzip", {"content-encoding": "gzip"})
    check_envelope(status, answer, 400)
    duplicate = good[:-1] + b', "model": "fake"}'
    assert (await facade.post(path, duplicate))[0] == 200


@ENDPOINTS
async def test_v4_models_paths_and_methods(facade: Harness, path: str) -> None:
    status, answer, _ = await facade.post(path, body_for(path, model="no-such-model"))
    assert check_envelope(status, answer, 404, "model")["code"] == "model_not_found"
    body = body_for(path)
    del body["model"]
    check_envelope(*(await facade.post(path, body))[:2], 400, "model")
    status, raw, headers = await facade.get(path)
    check_envelope(status, json.loads(raw), 405)
    assert headers["Allow"] == "POST"
    for missing in ("/v1/no/such", "/v1", "/v1/models/no-such-model"):
        status, raw, headers = await facade.get(missing)
        check_envelope(status, json.loads(raw), 404)
        assert headers["x-request-id"]


async def test_x_request_id_is_echoed_when_valid(facade: Harness) -> None:
    for path, body in ((CHAT, chat()), (CHAT, chat(n=0)), ("/v1/none", {})):
        _, answer, headers = await facade.post(path, body, {"x-request-id": "A-b_c.9"})
        assert headers["x-request-id"] == "A-b_c.9"
        assert answer.get("id") != "A-b_c.9"
        for bad in ("has space", "x" * 129, "é", ""):
            _, answer, headers = await facade.post(path, body, {"x-request-id": bad})
            assert headers["x-request-id"] == answer.get("id", headers["x-request-id"]) != bad


async def test_v8_content_parts(facade: Harness) -> None:
    async def prompt_of(role: str, content: Any) -> tuple[int, Any]:
        facade.reset()
        messages = [{"role": role, "content": content}, {"role": "user", "content": "?"}]
        status, answer, _ = await facade.post(CHAT, chat(messages=messages))
        return status, facade.fake.requests[0].prompt if status == 200 else answer

    for role in ("system", "developer", "user", "assistant", "tool"):
        status, plain = await prompt_of(role, "Hello")
        assert status == 200
        one = [{"type": "text", "text": "Hello"}]
        two = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        assert await prompt_of(role, one) == await prompt_of(role, two) == (200, plain)
    bad_contents: list[Any] = [
        [],
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        ["Hello"],
        5,
        None,
    ]
    for bad in bad_contents:
        status, answer = await prompt_of("user", bad)
        check_envelope(status, answer, 400, "messages[0].content")


async def test_the_history_of_tool_calls_is_taken(facade: Harness) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    prompts = []
    variants: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}, {"tool_calls": []}]
    for assistant in variants:
        facade.reset()
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "tool_calls": [call], **assistant},
            {"role": "tool", "tool_call_id": "c", "content": "15C"},
            {"role": "user", "content": "!"},
        ]
        status, answer, _ = await facade.post(CHAT, chat(messages=messages))
        assert status == 200, answer
        prompts.append(facade.fake.requests[0].prompt)
    assert prompts[0] == prompts[1] == prompts[2]
    assert "15C" in facade.tok.decode(prompt_ids(prompts[0]))


async def test_fields_that_only_a_template_could_honour_are_named(facade: Harness) -> None:
    body = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    status, _, headers = await facade.post(CHAT, body)
    assert status == 200
    assert headers["x-ignored-params"] == "chat_template_kwargs.enable_thinking, reasoning_effort"
    status, answer, _ = await facade.post(CHAT, chat(chat_template_kwargs={"messages": []}))
    check_envelope(status, answer, 400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("error", "expected", "code", "param"),
    [
        (ContextLengthExceeded("9 of 8"), 400, "context_length_exceeded", "messages"),
        (QueueFull("full", retry_after_seconds=1.5), 429, "queue_full", None),
        (OutOfMemory("no memory"), 503, "out_of_memory", None),
        (InternalError("secret detail"), 500, "internal_error", None),
        (
            InvalidRequest(
                "bad", field_violations=(FieldViolation("structured_output.json_schema", "no"),)
            ),
            400,
            "invalid_value",
            "response_format",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_errors_of_the_engine_keep_their_status_stream_or_not(
    facade: Harness, error: EngineClientError, expected: int, code: str, param: str | None
) -> None:
    """Refused at the door, and after Accepted but before the first step (a grammar that fails)."""
    for script in (Script.failing(error), Script((Accept(), Fail(error)))):
        for stream in (False, True):
            facade.fake.script(script)
            body = chat(stream=stream, response_format={"type": "json_object"})
            status, answer, headers = await facade.post(CHAT, body)
            found = check_envelope(status, answer, expected, param)
            assert found["code"] == code and "secret" not in found["message"]
            assert headers["content-type"].startswith("application/json")
            if expected == 429:
                assert (headers["Retry-After"], headers["retry-after-ms"]) == ("2", "1500")


async def test_a_failure_in_mid_stream_is_one_event_with_usage_and_done(facade: Harness) -> None:
    ids = facade.tok.encode("one two three")
    steps = Script.of_tokens(ids).steps[:-1]
    facade.fake.script(Script((*steps, Fail(OutOfMemory("no memory left")))))
    answer = await facade.stream(CHAT, chat(stream_options={"include_usage": True}))
    assert answer.status == 200
    assert answer.text() == "one two three"
    assert answer.finish_reasons() == []
    failure = answer.events[-1]
    assert failure["error"]["code"] == "out_of_memory"
    assert failure["usage"]["completion_tokens"] == len(ids)
    assert answer.num_done == 1 and answer.raw.endswith(b"data: [DONE]\n\n")
    status, whole, _ = await facade.post(CHAT, chat())
    check_envelope(status, whole, 503)


async def test_an_engine_that_breaks_the_protocol_is_an_internal_error(facade: Harness) -> None:
    facade.fake.script(Script((Accept(), Progress())))
    status, whole, _ = await facade.post(CHAT, chat())
    assert check_envelope(status, whole, 500)["code"] == "internal_error"
    answer = await facade.stream(CHAT, chat())
    assert answer.events[-1]["error"]["code"] == "internal_error" and answer.num_done == 1


async def test_one_prompt_that_fails_fails_all_and_cancels_the_others(facade: Harness) -> None:
    def script(request: Any) -> Script:
        if request.prompt == (9,):
            return Script.failing(OutOfMemory("no memory"))
        return Script.of_tokens([5] * 1000, delay_seconds=0.02)

    facade.fake.script(script)
    status, whole, _ = await facade.post(COMPLETIONS, completion(prompt=[[5], [9], [6]]))
    check_envelope(status, whole, 503)
    for call in facade.fake.calls:
        assert (await call.wait_closed()).value in ("cancelled", "failed")
    assert facade.fake.num_open_calls == 0


async def test_a_deadline_is_sent_on_and_ends_as_an_error(facade: Harness) -> None:
    facade.fake.script(Script.of_tokens([5] * 1000, delay_seconds=0.05))
    timeout = {"x-request-timeout": "3"}
    (status, whole, headers), answer = await asyncio.gather(
        facade.post(CHAT, chat(), timeout), facade.stream(CHAT, chat(), timeout)
    )
    assert check_envelope(status, whole, 504)["code"] == "deadline_exceeded"
    assert headers["x-should-retry"] == "false"
    for call in facade.fake.calls:
        assert call.timeout_seconds is not None
        assert 0 < call.timeout_seconds < 4  # the transport rounds up
    assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
    assert answer.finish_reasons() == []
    for bad in ("0", "-1", "nan", "soon", "1e5"):
        status, whole, _ = await facade.post(CHAT, chat(), {"x-request-timeout": bad})
        error = check_envelope(status, whole, 400, "x-request-timeout")
        assert "above 0, at most 86400" in error["message"]


async def test_bad_requests_disturb_no_neighbour(facade: Harness) -> None:
    ids = facade.say("one two three four five six seven eight", delay_seconds=0.03)
    neighbour = asyncio.create_task(facade.stream(CHAT, chat()))
    await asyncio.sleep(0.05)
    deep = b"[" * 100_000
    bad = [facade.post(CHAT, raw) for raw in (b"{", deep, b'{"temperature": NaN}') * 5]
    assert {status for status, _, _ in await asyncio.gather(*bad)} == {400}
    answer = await neighbour
    assert len(answer.deltas()) == len(ids) and answer.finish_reasons() == ["stop"]


async def test_a_long_prompt_leaves_the_event_loop_free(facade: Harness) -> None:
    """A megabyte of text is rendered and encoded while a neighbour's tokens keep coming."""
    facade.say("a b c d e f g h i j k l m n o p q r s t", delay_seconds=0.02)
    long = chat(messages=[{"role": "user", "content": "many words " * 90_000}])

    async def neighbour_goes_on() -> bool:
        neighbour = asyncio.create_task(facade.stream(CHAT, chat()))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        status, whole, _ = await facade.post(CHAT, long)
        seconds = time.monotonic() - began
        assert check_envelope(status, whole, 400)["code"] == "context_length_exceeded"
        times = (await neighbour).delta_times()
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return max(gaps) < max(0.25, 0.5 * seconds)

    # A busy machine stops the loop, too, but not each time.
    assert any([await neighbour_goes_on() for _ in range(3)])


async def test_models(facade: Harness) -> None:
    status, raw, _ = await facade.get("/v1/models")
    assert status == 200
    body = json.loads(raw)
    assert body["object"] == "list"
    (model,) = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("fake", "model", "firsttoken")
    assert model["max_model_len"] == facade.fake.model_info.max_model_len
    status, raw, _ = await facade.get("/v1/models/fake")
    assert status == 200 and json.loads(raw) == model
    _, whole, _ = await facade.post(CHAT, chat())
    assert text_of(whole) == "fine"
