"""CASES M1, M4, M6, P5 on the real server, and the parameters that constrain or explain tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.serving import Served, Stream, engine, post, stream, wait_idle

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = "The three most surprising things about the sea are"
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "v",
        "schema": {
            "type": "object",
            "properties": {"v": {"enum": ["abc", "abd", "xyz"]}},
            "required": ["v"],
            "additionalProperties": False,
        },
    },
}


def completion(served: Served, **fields: Any) -> dict[str, Any]:
    return {"model": served.model, "prompt": PROMPT, "max_tokens": 12, **fields}


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name a colour."}]
    return {"model": served.model, "messages": messages, "max_tokens": 12, **fields}


async def complete(served: Served, **fields: Any) -> dict[str, Any]:
    """The whole answer to a completions request that is accepted."""
    status, body, _ = await post(served.http, COMPLETIONS, completion(served, **fields))
    assert status == 200, body
    return body


async def text(served: Served, **fields: Any) -> str:
    answer: str = (await complete(served, **fields))["choices"][0]["text"]
    return answer


def alike(one: object, other: object, abs_tol: float = 1e-3) -> bool:
    """Equal but for the last digits of numbers: two requests are computed in different batches."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0, abs_tol=abs_tol)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k], abs_tol) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


# ---------------------------------------------------------------- M1: seeds


async def rescore(served: Served, token_ids: list[int]) -> list[float | None]:
    """L5: logprobs of every token, computed anew."""
    body = await complete(
        served, prompt=token_ids, echo=True, logprobs=1, max_tokens=1, cache_salt="rescore"
    )
    logprobs: list[float | None] = body["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


async def test_m1_a_seed_holds_in_any_company(served: Served) -> None:
    fields = {"temperature": 0.9, "seed": 42, "max_tokens": 24, "ignore_eos": True}

    async def seeded(**more: Any) -> str:
        return await text(served, **{**fields, **more})

    alone = await seeded()
    assert await seeded() == await seeded() == alone
    neighbours: tuple[list[dict[str, Any]], ...] = (
        [{"seed": None}] * 7,
        [{"seed": i} for i in range(100, 107)],
    )
    for others in neighbours:
        background = [
            seeded(prompt=f"Item {i}:", max_tokens=16, **more) for i, more in enumerate(others)
        ]
        first, *_, last, twin = await asyncio.gather(seeded(), *background, seeded(), seeded())
        assert first == last == twin == alone
    assert await seeded(seed=43) != alone
    assert len(set(alone.split())) > 3


# ---------------------------------------------------------------- M4: extreme values

REFUSED = [
    *(("temperature", raw) for raw in ("2.1", "-0.1", "NaN", "Infinity", "1e400", '"0.5"', "true")),
    *(("top_p", raw) for raw in ("1.1", "NaN", "-0.1")),
    ("top_p", "0"),
    ("top_k", "1.5"),
    ("top_k", "-2"),
    *(("min_p", raw) for raw in ("1.1", "-0.1", "NaN")),
    *(
        (name, raw)
        for name in ("presence_penalty", "frequency_penalty")
        for raw in ("2.1", "-2.1", "NaN")
    ),
    *(("repetition_penalty", raw) for raw in ("0", "-1", "NaN", "10.5")),
]
GREEDY_ALIKE = [
    {"temperature": 1e-6},
    {"temperature": 1e-4},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.5, "min_p": 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0, "top_k": 10**9, "top_p": 0.5, "min_p": 0.5},
]
TAKEN = [
    {"temperature": 2, "seed": 1},
    {"temperature": 1, "seed": 1, "top_k": -1},
    {"temperature": 1, "seed": 1, "top_k": 0},
    {"temperature": 1, "seed": 1, "top_k": 10**9},
    {"temperature": 1, "seed": 1, "min_p": 0, "top_p": 1},
    {"presence_penalty": 2, "frequency_penalty": -2, "temperature": 0},
    {"presence_penalty": -2, "frequency_penalty": 2, "temperature": 0},
]


async def test_m4_extreme_values_are_refused_or_work(served: Served) -> None:
    neighbour = asyncio.create_task(text(served, temperature=0, max_tokens=40, ignore_eos=True))
    for name, raw in REFUSED:
        for path, body in ((COMPLETIONS, completion(served)), (CHAT, chat(served))):
            data = json.dumps(body)[:-1] + f', "{name}": {raw}}}'
            status, answer, _ = await post(served.http, path, data.encode())
            assert status == 400, (path, name, raw, answer)
            if raw not in ("NaN", "Infinity"):  # those are no JSON: the body is what's wrong
                assert answer["error"]["param"] == name, (path, name, raw, answer)
    greedy = await text(served, temperature=0)
    assert greedy.strip()
    texts = await asyncio.gather(*(text(served, **fields) for fields in GREEDY_ALIKE))
    assert texts == [greedy] * len(GREEDY_ALIKE)
    taken = await asyncio.gather(*(complete(served, **fields) for fields in TAKEN))
    assert all(body["usage"]["completion_tokens"] > 0 for body in taken)
    off = [body["choices"][0]["text"] for body in taken[1:5]]
    assert off == off[:1] * 4  # each says: no filter
    alone = await text(served, temperature=0, max_tokens=40, ignore_eos=True)
    assert await neighbour == alone


# ---------------------------------------------------------------- M6: logprobs

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_k": {"temperature": 1, "top_k": 1},
    "top_p": {"temperature": 1, "seed": 3, "top_p": 0.1},
    "bias": {"temperature": 0, "logit_bias": {"28": -100}},
    "schema": {"temperature": 0, "response_format": SCHEMA, "max_tokens": 20},
}


def strict(answer: Stream | Mapping[str, Any]) -> None:
    """No NaN and no Infinity anywhere: json.loads takes them, strict readers don't."""
    json.dumps(answer, allow_nan=False)


async def both_modes(
    served: Served, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The only choice of the whole answer, and the logprobs of the streamed one in pieces."""
    (status, whole, _), streamed = await asyncio.gather(
        post(served.http, path, body), stream(served.http, path, body)
    )
    assert status == streamed.status == 200, whole
    strict(whole)
    strict({"events": streamed.events})
    pieces = [c["logprobs"] for c in streamed.choice_chunks() if c.get("logprobs")]
    return {**whole["choices"][0], "usage": whole["usage"]}, pieces


@pytest.mark.parametrize("top", [None, 5, 20])
async def test_m6_logprobs_of_chats(served: Served, top: int | None) -> None:
    asked: dict[str, Any] = {"logprobs": True, "max_tokens": 8}
    if top is not None:
        asked["top_logprobs"] = top
    answers = await asyncio.gather(
        *(both_modes(served, CHAT, chat(served, **{**asked, **s})) for s in SAMPLINGS.values())
    )
    by_name: dict[str, list[float]] = {}
    for name, (choice, pieces) in zip(SAMPLINGS, answers, strict=True):
        entries = choice["logprobs"]["content"]
        assert len(entries) == choice["usage"]["completion_tokens"], name
        assert alike([e for piece in pieces for e in piece["content"]], entries), name
        for entry in entries:
            ranked = [one["logprob"] for one in entry["top_logprobs"]]
            assert len(ranked) == (top or 0)
            assert ranked == sorted(ranked, reverse=True)
            assert all(value <= 0 for value in (*ranked, entry["logprob"]))
            assert sum(map(math.exp, ranked)) <= 1 + 1e-3
        by_name[name] = [entry["logprob"] for entry in entries]
        assert min(by_name[name]) < 0
    assert alike(by_name["top_k"], by_name["greedy"])  # raw: the filters don't show


@pytest.mark.parametrize("top", [0, 5])
async def test_m6_logprobs_of_completions(served: Served, top: int) -> None:
    samplings = {**SAMPLINGS, "echo": {"temperature": 0, "echo": True}}
    asked = {"logprobs": top, "max_tokens": 8}
    answers = await asyncio.gather(
        *(
            both_modes(served, COMPLETIONS, completion(served, **{**asked, **s}))
            for s in samplings.values()
        )
    )
    for name, (choice, pieces) in zip(samplings, answers, strict=True):
        logprobs = choice["logprobs"]
        for field, values in logprobs.items():
            assert alike([one for piece in pieces for one in piece[field]], values), (name, field)
        num_echoed = choice["usage"]["prompt_tokens"] if name == "echo" else 0
        assert len(logprobs["tokens"]) == num_echoed + choice["usage"]["completion_tokens"]
        fields = (logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
        entries = list(zip(*fields, strict=True))
        if num_echoed:
            assert entries.pop(0)[1:] == (None, None)
        for token, logprob, ranked in entries:
            assert ranked[token] == logprob <= 0
            assert max(top, 1) <= len(ranked) <= top + 1
            assert sum(map(math.exp, ranked.values())) <= 1 + 1e-3
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"].startswith(token, offset) or token == "<|im_end|>"


# ---------------------------------------------------------------- P5: min_tokens


async def test_p5_min_tokens_counts_exactly(served: Served, tok: PreTrainedTokenizerBase) -> None:
    eos = tok.eos_token_id
    stop_id = tok.encode(" sea")[0]
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({"logit_bias": {str(eos): 100}}, None),
        ({"logit_bias": {str(stop_id): 100}, "stop_token_ids": [stop_id]}, stop_id),
    ]
    for fields, reason in cases:
        counts = {}
        for m in (0, 1, 4):
            body = completion(served, **fields, temperature=0, max_tokens=32, min_tokens=m)
            (status, whole, _), streamed = await asyncio.gather(
                post(served.http, COMPLETIONS, body),
                stream(
                    served.http, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}
                ),
            )
            assert status == 200, whole
            choice = whole["choices"][0]
            assert choice["finish_reason"] == "stop" == streamed.finish_reasons()[0]
            assert choice["stop_reason"] == reason
            assert streamed.text() == choice["text"]
            counts[m] = whole["usage"]["completion_tokens"]
            usage = streamed.usage()
            assert usage is not None
            assert usage["completion_tokens"] == counts[m]
        # an end at m tokens at the earliest, and that end is one token more
        assert counts == {0: 1, 1: 2, 4: 5}


async def test_p5_min_tokens_and_stop_strings(served: Served) -> None:
    plain = await complete(served, temperature=0, max_tokens=24, logprobs=0)
    tokens = plain["choices"][0]["logprobs"]["tokens"]
    stop = tokens[2].strip()
    cut = plain["choices"][0]["text"].index(stop)
    early, late = await asyncio.gather(
        complete(served, temperature=0, max_tokens=24, stop=stop),
        complete(served, temperature=0, max_tokens=24, stop=stop, min_tokens=8),
    )
    assert early["choices"][0]["text"] == plain["choices"][0]["text"][:cut]
    assert early["choices"][0]["finish_reason"] == "stop"
    assert early["usage"]["completion_tokens"] <= 4
    assert late["usage"]["completion_tokens"] >= 8
    assert late["choices"][0]["text"].startswith("".join(tokens[:8])[:-1])
    body = completion(served, temperature=0, max_tokens=24, stop=stop, min_tokens=8)
    streamed = await stream(served.http, COMPLETIONS, body)
    assert streamed.text() == late["choices"][0]["text"]


# ---------------------------------------------------------------- constraints on tokens


async def test_allowed_token_ids_leave_no_others(
    served: Served, tok: PreTrainedTokenizerBase
) -> None:
    allowed = [tok.encode(word)[0] for word in (" red", " green", " blue")]
    for fields in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        body = await complete(
            served, **fields, allowed_token_ids=allowed, return_token_ids=True, ignore_eos=True
        )
        token_ids = body["choices"][0]["token_ids"]
        assert len(token_ids) == 12
        assert set(token_ids) <= set(allowed)


async def test_bad_words_do_not_appear(served: Served, tok: PreTrainedTokenizerBase) -> None:
    ask = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    assert (await text(served, **ask)).startswith(" Paris")
    without = await text(served, **ask, bad_words=["Paris"])
    assert " Paris" not in without
    # several tokens: only the last one is taken away, and only after the others
    plain = await complete(served, temperature=0, return_token_ids=True)
    token_ids = plain["choices"][0]["token_ids"]
    phrase = tok.decode(token_ids[3:6])
    assert len(tok.encode(phrase)) == 3
    changed = await complete(served, temperature=0, return_token_ids=True, bad_words=[phrase])
    changed_ids = changed["choices"][0]["token_ids"]
    assert phrase not in changed["choices"][0]["text"]
    assert changed_ids[:5] == token_ids[:5]


async def test_constraints_that_leave_nothing_are_the_callers_error(served: Served) -> None:
    body = completion(served, allowed_token_ids=[5], response_format=SCHEMA)
    status, answer, _ = await post(served.http, COMPLETIONS, body)
    assert status == 400, answer
    assert "no token" in answer["error"]["message"]


# ---------------------------------------------------------------- echo, token ids, truncation


async def test_echo_scores_the_prompt_in_every_form(
    served: Served, tok: PreTrainedTokenizerBase
) -> None:
    token_ids = tok.encode(PROMPT)
    ask = {"echo": True, "logprobs": 1, "temperature": 0, "return_token_ids": True}
    warm = await complete(served, prompt=token_ids, max_tokens=1)
    assert warm["usage"]["prompt_tokens"] == len(token_ids)
    by_text, by_ids, none = await asyncio.gather(
        complete(served, **ask, max_tokens=1),
        complete(served, **ask, prompt=token_ids, max_tokens=1),
        complete(served, **ask, max_tokens=0),
    )
    one, two, zero = (body["choices"][0] for body in (by_text, by_ids, none))
    assert one["text"] == two["text"] and one["text"].startswith(PROMPT)
    assert alike(one["logprobs"], two["logprobs"])
    assert one["prompt_token_ids"] == token_ids
    assert one["logprobs"]["tokens"] == [tok.decode([i]) for i in token_ids + one["token_ids"]]
    assert (zero["text"], zero["finish_reason"]) == (PROMPT, "length")
    assert zero["token_ids"] == []
    assert none["usage"]["completion_tokens"] == 0
    assert zero["logprobs"]["tokens"] == one["logprobs"]["tokens"][:-1]
    assert alike(zero["logprobs"]["token_logprobs"], one["logprobs"]["token_logprobs"][:-1])
    assert none["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await wait_idle(served, 5.0)


async def test_echo_agrees_with_the_logprobs_of_generation(served: Served) -> None:
    made = await complete(
        served, temperature=0, logprobs=0, return_token_ids=True, ignore_eos=True, max_tokens=20
    )
    choice = made["choices"][0]
    token_ids = choice["prompt_token_ids"] + choice["token_ids"]
    scored = await rescore(served, token_ids)
    assert scored[0] is None
    num_prompt = len(choice["prompt_token_ids"])
    assert scored[num_prompt:-1] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-2)


async def test_echo_of_several_samples_and_prompts(served: Served) -> None:
    prompts = ["One two three", "The sea"]
    body = completion(
        served, prompt=prompts, n=2, echo=True, logprobs=0, temperature=1, seed=1, max_tokens=3
    )
    (_, whole, _), streamed = await asyncio.gather(
        post(served.http, COMPLETIONS, body), stream(served.http, COMPLETIONS, body)
    )
    for i, choice in enumerate(whole["choices"]):
        assert choice["text"].startswith(prompts[i // 2])
        assert streamed.text(i) == choice["text"]
        pieces = [c["logprobs"] for c in streamed.choice_chunks(i) if c.get("logprobs")]
        for field, values in choice["logprobs"].items():
            assert alike([one for piece in pieces for one in piece[field]], values)
        tokens = choice["logprobs"]["tokens"]
        assert b"".join(map(bytes_of, tokens)).decode() == choice["text"]


def bytes_of(token: str) -> bytes:
    """A token that is a part of a character is told as `bytes:\\xe2\\x80`."""
    hexadecimal = token.removeprefix("bytes:")
    if hexadecimal == token:
        return token.encode()
    return bytes.fromhex(hexadecimal.replace("\\x", ""))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_and_token_ids(
    served: Served, tok: PreTrainedTokenizerBase, path: str
) -> None:
    make = completion if path == COMPLETIONS else chat
    body = make(served, temperature=0, prompt_logprobs=3, return_token_ids=True)
    (status, whole, _), streamed = await asyncio.gather(
        post(served.http, path, body), stream(served.http, path, body)
    )
    assert status == 200, whole
    strict(whole)
    holder = whole["choices"][0] if path == COMPLETIONS else whole
    prompt_ids, told = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert len(told) == len(prompt_ids) == whole["usage"]["prompt_tokens"]
    assert told[0] is None
    for token_id, entry in zip(prompt_ids[1:], told[1:], strict=True):
        own = entry[str(token_id)]
        assert own["decoded_token"] == tok.decode([token_id])
        assert 3 <= len(entry) <= 4
        assert sorted(one["rank"] for one in entry.values())[:3] == [1, 2, 3]
    first = streamed.events[0]["choices"][0] if path == COMPLETIONS else streamed.events[0]
    assert first["prompt_token_ids"] == prompt_ids
    assert alike(first["prompt_logprobs"], told)
    sent = [i for c in streamed.choice_chunks() for i in c.get("token_ids", ())]
    assert sent == whole["choices"][0]["token_ids"]
    assert len(sent) == whole["usage"]["completion_tokens"]


async def test_prompts_are_truncated_from_the_left(
    served: Served, tok: PreTrainedTokenizerBase
) -> None:
    token_ids = tok.encode(PROMPT)
    body = await complete(
        served, truncate_prompt_tokens=3, return_token_ids=True, echo=True, max_tokens=1
    )
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == token_ids[-3:]
    assert choice["text"].startswith(tok.decode(token_ids[-3:]))
    async with engine(served) as client:
        max_model_len = (await client.get_model_info()).max_model_len
    end_at_once = {"logit_bias": {str(tok.eos_token_id): 100}, "temperature": 0}
    fitted = await complete(
        served,
        **end_at_once,
        prompt=[28] * (max_model_len + 100),
        truncate_prompt_tokens=-1,
        max_tokens=max_model_len - 20,
    )
    assert fitted["usage"]["prompt_tokens"] == 20
    status, answer, _ = await post(
        served.http, COMPLETIONS, completion(served, truncate_prompt_tokens=0)
    )
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
