"""CASES S1, S2, S5, D1, D5, D6, P1, P3, M6 against a scripted engine: both endpoints and modes."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clients.testing import Accept, Emit, Finish, Pause, Progress, Script
from clients.types import FinishReason, TokenLogprobs
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    EOS,
    Harness,
    body_for,
    chat,
    completion,
    facade_and_fake,
    prompt_ids,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
UNICODE = "🌶️ 👩‍👩‍👧 ďábel 漢字 नमस्ते"
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {"logprobs": 2},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir, sse_keepalive_seconds=0.2) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    return shared


@ENDPOINTS
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("ending", ["eos", "length", "stop"])
async def test_s1_every_stream_ends_once(
    facade: Harness, path: str, with_logprobs: bool, ending: str
) -> None:
    text = "One, two, three, four."
    if ending == "length":
        facade.say(text, reason=FinishReason.LENGTH, stop_token_id=None)
    else:
        facade.say(text)
    body = body_for(path, **(LOGPROBS[path] if with_logprobs else {}))
    if ending == "stop":
        body["stop"] = [" three"]
    reason = "length" if ending == "length" else "stop"

    answer = await facade.stream(path, body)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.finish_reasons() == [reason]
    assert all("finish_reason" in chunk for chunk in answer.choice_chunks())
    assert answer.num_done == 1
    assert answer.raw.endswith(b"\n\ndata: [DONE]\n\n") and answer.after_done == b""
    assert not any("usage" in event for event in answer.events)

    status, whole, _ = await facade.post(path, body)
    assert status == 200
    assert text_of(whole) == answer.text() == ("One, two," if ending == "stop" else text)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == reason
    assert choice["stop_reason"] == (" three" if ending == "stop" else None)
    assert answer.choice_chunks()[-1]["stop_reason"] == choice["stop_reason"]


@ENDPOINTS
async def test_chunks_have_the_documented_shape(facade: Harness, path: str) -> None:
    facade.say("Hi there")
    answer = await facade.stream(path, body_for(path))
    _, whole, headers = await facade.post(path, body_for(path))
    kind = "chat.completion" if path == CHAT else "text_completion"
    chunk_kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert whole["object"] == kind and headers["x-request-id"] == whole["id"]
    for event in answer.events:
        assert event["object"] == chunk_kind
        assert event["id"] == answer.events[0]["id"] == answer.headers["x-request-id"]
        assert event["model"] == "fake"
        assert event["system_fingerprint"] == whole["system_fingerprint"] != ""
        assert isinstance(event["created"], int)
    assert whole["id"] != answer.events[0]["id"]
    if path == CHAT:
        first, *middle, last = answer.choice_chunks()
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(chunk["delta"]) == {"content"} for chunk in middle)
        assert last["delta"] == {}
        assert whole["choices"][0]["message"] == {
            "role": "assistant",
            "content": "Hi there",
            "refusal": None,
        }


@ENDPOINTS
async def test_s2_usage(facade: Harness, path: str) -> None:
    ids = facade.say("Count to ten, please.", cached_tokens=16)
    body = body_for(path, prompt=[9] * 40) if path == COMPLETIONS else body_for(path)
    _, whole, _ = await facade.post(path, body)
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(ids) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["prompt_tokens"] == len(facade.fake.calls[0].request.prompt)

    asked = await facade.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert asked.events[-1]["choices"] == []
    assert asked.events[-1]["usage"] == usage
    assert all(event["usage"] is None for event in asked.events[:-1])

    for options in (None, {}, {"include_usage": False}):
        quiet = await facade.stream(path, {**body, "stream_options": options})
        assert not any(event.get("usage") for event in quiet.events)
        assert all(event["choices"] for event in quiet.events)


@ENDPOINTS
async def test_s2_running_totals(facade: Harness, path: str) -> None:
    ids = facade.say("Count to ten, please.", stop_token_id=None, chunk_sizes=(1, 2, 1))
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await facade.stream(path, body_for(path, stream_options=options))
    totals = [event["usage"]["completion_tokens"] for event in answer.events]
    assert totals == sorted(totals) and totals[-1] == len(ids)
    contents = [
        event["usage"]["completion_tokens"]
        for event in answer.events
        if event["choices"] and (event["choices"][0].get("text") or _content(event))
    ]
    assert contents[-1] == len(ids)


def _content(event: dict[str, Any]) -> str | None:
    content: str | None = event["choices"][0].get("delta", {}).get("content")
    return content


@ENDPOINTS
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("together", [True, False], ids=["one message", "back to back"])
async def test_s5_the_last_delta_is_never_lost(
    facade: Harness, path: str, num_tokens: int, together: bool
) -> None:
    ids = facade.tok.encode("alpha beta gamma delta epsilon")[:num_tokens]
    chunks = [ids] if together else [[token_id] for token_id in ids]
    emits = [Emit(chunk) for chunk in chunks]
    facade.fake.script(Script((Accept(), Progress(), *emits, Finish(FinishReason.LENGTH))))
    answer = await facade.stream(path, body_for(path))
    _, whole, _ = await facade.post(path, body_for(path))
    assert answer.text() == text_of(whole) == facade.tok.decode(ids)
    assert whole["usage"]["completion_tokens"] == num_tokens


@ENDPOINTS
async def test_d1_characters_split_over_tokens(facade: Harness, path: str) -> None:
    ids = facade.say(UNICODE)
    answer = await facade.stream(path, body_for(path))
    assert answer.text() == UNICODE
    assert not any("\ufffd" in delta for delta in answer.deltas())
    for k in range(1, len(ids), 5):
        facade.fake.script(Script.of_tokens(ids[:k], reason=FinishReason.LENGTH))
        cut = await facade.stream(path, body_for(path))
        _, whole, _ = await facade.post(path, body_for(path))
        assert cut.text() == text_of(whole)
        assert "\ufffd" not in cut.text()[:-1]
        assert UNICODE.startswith(cut.text().rstrip("\ufffd"))
        assert whole["usage"]["completion_tokens"] == k


async def test_d5_bytes_of_logprobs_are_the_tokens_own(facade: Harness) -> None:
    facade.say(UNICODE)
    body = chat(logprobs=True, top_logprobs=5)
    _, whole, _ = await facade.post(CHAT, body)
    answer = await facade.stream(CHAT, body)
    entries = whole["choices"][0]["logprobs"]["content"]
    sent = [
        entry
        for chunk in answer.choice_chunks()
        for entry in (chunk["logprobs"] or {"content": []})["content"]
    ]
    assert sent == entries
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined == UNICODE.encode() + b"<|im_end|>"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        assert all(top["bytes"] != [239, 191, 189] for top in entry["top_logprobs"])
        assert entry["logprob"] <= 0


async def test_m6_logprobs_are_finite_and_one_per_token(facade: Harness) -> None:
    ids = facade.tok.encode("a b c")
    lowest = float("-inf")
    logprobs = [TokenLogprobs(lowest, 9, ((7, -0.1), (8, lowest))) for _ in ids]
    facade.fake.script(Script((Accept(), Emit(ids, logprobs=logprobs), Finish())))
    for path, fields in ((CHAT, LOGPROBS[CHAT]), (COMPLETIONS, {"logprobs": 2})):
        _, whole, _ = await facade.post(path, body_for(path, **fields))
        raw = (await facade.stream(path, body_for(path, **fields))).raw
        assert b"Infinity" not in raw and b"NaN" not in raw and b"-9999.0" in raw
        body = whole["choices"][0]["logprobs"]
        if path == CHAT:
            assert [entry["logprob"] for entry in body["content"]] == [-9999.0] * len(ids)
            assert len(body["content"][0]["top_logprobs"]) == 2
        else:
            assert body["token_logprobs"] == [-9999.0] * len(ids)
            assert "".join(body["tokens"]) == "a b c"
            assert body["text_offset"] == [0, 1, 3]
            assert all(token in top for token, top in _pairs(body))
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        _, whole, _ = await facade.post(CHAT, chat(**fields))
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == len(ids)
        assert facade.fake.requests[-1].num_logprobs == 0


def _pairs(body: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    return list(zip(body["tokens"], body["top_logprobs"], strict=True))


@ENDPOINTS
async def test_d6_special_tokens_and_whitespace(facade: Harness, path: str) -> None:
    facade.fake.script(Script.of_tokens([EOS] * 4, reason=FinishReason.LENGTH))
    for skip, expected in ((True, ""), (False, "<|im_end|>" * 4)):
        body = body_for(path, ignore_eos=True, skip_special_tokens=skip, max_tokens=4)
        answer = await facade.stream(path, body)
        _, whole, _ = await facade.post(path, body)
        assert text_of(whole) == answer.text() == expected
        assert whole["usage"]["completion_tokens"] == 4
    for text in ("a    b\n\n\n  c\t\td ", " Paris", "\n\n"):
        facade.say(text)
        answer = await facade.stream(path, body_for(path))
        _, whole, _ = await facade.post(path, body_for(path))
        assert answer.text() == text_of(whole) == text


@ENDPOINTS
@pytest.mark.parametrize("include", [False, True])
async def test_p1_no_part_of_a_stop_string_is_sent(
    facade: Harness, path: str, include: bool
) -> None:
    facade.say("x ABCDEFGHIJK y", delay_seconds=0.002)
    body = body_for(path, stop=["DEFGHIJ"], include_stop_str_in_output=include)
    answer = await facade.stream(path, body)
    call = facade.fake.calls[0]
    assert (await call.wait_closed()).value == "cancelled"  # the engine stopped at once
    _, whole, _ = await facade.post(path, body)
    expected = "x ABCDEFGHIJ" if include else "x ABC"
    assert answer.text() == text_of(whole) == expected
    if not include:
        assert not any(letter in delta for delta in answer.deltas() for letter in "DEFGHIJ")
    assert answer.finish_reasons() == ["stop"]
    up_to_stop = next(
        k
        for k in range(1, 20)
        if "DEFGHIJ" in facade.tok.decode(facade.tok.encode("x ABCDEFGHIJK y")[:k])
    )
    assert whole["usage"]["completion_tokens"] == up_to_stop


async def test_p3_only_what_could_become_a_stop_string_waits(facade: Harness) -> None:
    text = "The quick brown fox quietly jumps over the lazy dog."
    ids = facade.say(text, delay_seconds=0.05)  # long enough for each to go out by itself
    plain = await facade.stream(CHAT, chat())
    stopped = await facade.stream(CHAT, chat(stop=["q" * 200]))
    assert stopped.text() == plain.text() == text
    assert len(plain.deltas()) == len(ids)
    assert abs(len(stopped.deltas()) - len(plain.deltas())) <= 1
    gaps = [after - before for before, after in itertools.pairwise(stopped.delta_times())]
    assert statistics.median(gaps) < 0.2  # each token's text in its own step


async def test_keep_alive_comments_come_only_after_the_beginning(facade: Harness) -> None:
    pause = Pause(0.5)
    ids = facade.tok.encode("Hi")
    facade.fake.script(Script((Accept(), pause, Progress(), pause, Emit(ids), Finish())))
    began = time.monotonic()
    answer = await facade.stream(CHAT, chat())
    seconds = time.monotonic() - began
    assert answer.raw.startswith(b"data: ")
    assert 1 <= answer.raw.count(b": keep-alive\n\n") <= (seconds - 0.5) / 0.2
    assert answer.text() == "Hi"


@ENDPOINTS
async def test_samples_and_prompts_have_their_own_index(facade: Harness, path: str) -> None:
    words = ["zero", "one", "two", "three"]
    samples = [facade.tok.encode(word) for word in words]

    def script(request: Any) -> Script:
        start = 2 if path == COMPLETIONS and 9 in request.prompt else 0
        return Script.of_samples(samples[start : start + request.sampling.n], cached_tokens=1)

    facade.fake.script(script)
    body = chat(n=4) if path == CHAT else completion(prompt=[[5, 6, 7], [9]], n=2)
    status, whole, _ = await facade.post(path, body)
    assert status == 200
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [text_of(whole, i) for i in range(4)] == words
    answer = await facade.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert [answer.text(i) for i in range(4)] == words
    assert [answer.finish_reasons(i) for i in range(4)] == [["stop"]] * 4
    assert answer.usage() == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(map(len, samples))
    if path == COMPLETIONS:
        assert whole["usage"]["prompt_tokens"] == 4
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@ENDPOINTS
async def test_a_stop_string_ends_one_sample_and_leaves_its_siblings(
    facade: Harness, path: str
) -> None:
    stopping, going = facade.tok.encode("ab STOP cd"), facade.tok.encode("one two three four")
    facade.fake.script(Script.of_samples([stopping, going, going], delay_seconds=0.01))
    answer = await facade.stream(path, body_for(path, n=3, stop="STOP"))
    assert answer.text(0) == "ab "
    assert answer.text(1) == answer.text(2) == "one two three four"
    assert [answer.finish_reasons(i) for i in range(3)] == [["stop"]] * 3
    call = facade.fake.calls[0]
    assert [(a.request_id, a.indices) for a in facade.fake.aborts] == [
        (call.request.request_id, (0,))
    ]
    assert (await call.wait_closed()).value == "finished"


async def test_echo_gives_the_prompt_back(facade: Harness) -> None:
    facade.say(" there was")
    for prompt, expected in (
        ("Once upon", ["Once upon there was"]),
        (["A", "B"], ["A there was", "B there was"]),
        (facade.tok.encode("Ids"), ["Ids there was"]),
    ):
        body = completion(prompt=prompt, echo=True)
        _, whole, _ = await facade.post(COMPLETIONS, body)
        answer = await facade.stream(COMPLETIONS, body)
        texts = [text_of(whole, i) for i in range(len(expected))]
        assert texts == [answer.text(i) for i in range(len(expected))] == expected


async def test_what_the_engine_is_asked_for(facade: Harness) -> None:
    facade.say("x")
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    body = chat(
        max_completion_tokens=7,
        min_tokens=2,
        stop_token_ids=[5],
        ignore_eos=True,
        temperature=0.5,
        seed=3,
        priority=-1,
        cache_salt="s",
        logit_bias={"9": 1},
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    status, _, _ = await facade.post(CHAT, body, {"x-request-id": "mine-1"})
    assert status == 200
    request = facade.fake.requests[0]
    assert request.request_id.startswith("mine-1-") and len(request.request_id) > 12
    assert (request.stopping.max_tokens, request.stopping.min_tokens) == (7, 2)
    assert (tuple(request.stopping.stop_token_ids), request.stopping.ignore_eos) == ((5,), True)
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 3)
    assert (request.priority, request.cache_salt, request.model) == (-1, "s", "fake")
    assert request.tokenizer_digest == facade.fake.tokenizer.digest
    assert request.structured_output is not None
    assert json.loads(request.structured_output.json_schema or "") == schema
    assert facade.tok.decode(prompt_ids(request.prompt), skip_special_tokens=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
