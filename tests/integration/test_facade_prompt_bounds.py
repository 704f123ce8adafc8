"""Prompts that can't be served whatever happens: refused early, by what is known of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clients.text.tokenizer import Tokenizer
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

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # the client's
]

MAT = "the cat sat on a mat. "


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        harness.say("fine")
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    return shared


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, completion(prompt=MAT * 1_300_000), "prompt"),
        (COMPLETIONS, completion(prompt=["fine", MAT * 1_300_000]), "prompt[1]"),
        (COMPLETIONS, completion(prompt=MAT * 1_300_000, truncate_prompt_tokens=8192), "prompt"),
        (CHAT, chat(messages=[{"role": "user", "content": MAT * 1_300_000}]), "messages"),
    ],
    ids=["text", "list", "truncated to too much", "chat"],
)
async def test_a_text_far_beyond_the_context_is_refused_unread(
    facade: Harness, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    data = json.dumps(body).encode()
    began = time.monotonic()
    status, answer, _ = await facade.post(path, data)
    assert time.monotonic() - began < 10  # to encode it takes longer than a minute
    error = check_envelope(status, answer, 400, param)
    assert error["code"] == "context_length_exceeded"
    assert "at least 353087 tokens" in error["message"] or path == CHAT
    assert str(facade.fake.model_info.max_model_len) in error["message"]
    assert sum(encoded) < 100


async def test_the_bound_is_never_above_what_the_text_has(facade: Harness) -> None:
    for text in (
        "",
        MAT * 50,
        " " * 5000,
        "=" * 5000,
        "ж" * 300,
        "👩‍👩‍👧‍👦" * 50,
        "<|im_start|>" * 9,
    ):
        num_tokens = len(facade.tok.encode(text, add_special_tokens=False))
        assert facade.tok.min_tokens(text) <= num_tokens
        assert len(text) <= facade.tok.max_chars(num_tokens)


async def test_truncation_of_a_long_text_keeps_the_tokens_at_its_end(facade: Harness) -> None:
    context = facade.fake.model_info.max_model_len
    text = MAT * (2 * facade.tok.max_chars(context) // len(MAT) + 1000) + "The very end"
    body = completion(prompt=text, truncate_prompt_tokens=9, echo=True, max_tokens=1)
    status, answer, _ = await facade.post(COMPLETIONS, body)
    assert status == 200, answer
    tail = facade.tok.encode(MAT * 20 + "The very end", add_special_tokens=False)[-9:]
    assert prompt_ids(facade.fake.requests[0].prompt) == tail
    assert answer["choices"][0]["text"].startswith(facade.tok.decode(tail))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"prompt": ["a"] * 21}, "20"),
        ({"prompt": ["a"] * 11, "n": 2}, "20"),
        ({"prompt": [[5] * 6] * 7}, "40 tokens"),
        ({"prompt": [[5] * 6] * 4, "n": 2}, "40 tokens"),
    ],
)
async def test_a_list_that_no_queue_could_hold_is_400_and_never_429(
    embedded_model_dir: Path, fields: dict[str, Any], limit: str
) -> None:
    async with facade_and_fake(embedded_model_dir) as facade:
        facade.fake.model_info = dataclasses.replace(
            facade.fake.model_info, max_queued_samples=20, max_queued_tokens=40
        )
        await facade.running.facade.engines.engines[0].refresh()
        facade.say("fine")
        status, answer, headers = await facade.post(COMPLETIONS, completion(**fields))
        error = check_envelope(status, answer, 400, "prompt")
        assert f"at most {limit}" in error["message"]
        assert "Retry-After" not in headers and facade.fake.calls == []
        for fits in (["a"] * 20, [[5] * 10] * 4, [5] * 41):  # one prompt always may
            assert (await facade.post(COMPLETIONS, completion(prompt=fits)))[0] == 200
