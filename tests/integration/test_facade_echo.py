"""Echo, prompt logprobs and what constrains tokens, against a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from clients.testing import Accept, Emit, Finish, Hang, Progress, Script
from clients.testing.fake_call import Outcome
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    Harness,
    body_for,
    check_envelope,
    completion,
    facade_and_fake,
    prompt_ids,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDPOINTS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
TEXT = "Once upon a time"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    return shared


async def test_an_echo_is_scored_over_a_prefill_in_chunks(facade: Harness) -> None:
    ids, more = facade.tok.encode(TEXT), facade.tok.encode(" there")
    facade.fake.script(
        Script((Accept(), Progress(1), Progress(3), Progress(), Emit(more), Finish()))
    )
    body = completion(prompt=TEXT, echo=True, logprobs=1)
    (_, whole, _), streamed = await asyncio.gather(
        facade.post(COMPLETIONS, body), facade.stream(COMPLETIONS, body)
    )
    (choice,) = whole["choices"]
    assert choice["text"] == streamed.text() == TEXT + " there"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [facade.tok.token_text(i) for i in ids + more]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1 + len(more))
    assert [choice["text"][at:] for at in logprobs["text_offset"]][-1] == " there"
    pieces = [c["logprobs"] for c in streamed.choice_chunks() if c.get("logprobs")]
    for field, values in logprobs.items():
        assert [one for piece in pieces for one in piece[field]] == values
    assert facade.fake.calls[0].request.num_prompt_logprobs == 1


async def test_an_echo_without_tokens_leaves_when_the_prompt_is_computed(facade: Harness) -> None:
    facade.fake.script(Script((Accept(), Progress(), Hang())))
    body = completion(prompt=TEXT, echo=True, max_tokens=0, logprobs=0)
    status, whole, _ = await facade.post(COMPLETIONS, body)
    assert status == 200
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 0
    assert await facade.fake.calls[0].wait_closed() is Outcome.CANCELLED


async def test_no_tokens_without_an_echo_are_refused(facade: Harness) -> None:
    for path in (CHAT, COMPLETIONS):
        status, answer, _ = await facade.post(path, body_for(path, max_tokens=0))
        check_envelope(status, answer, 400, "max_tokens")
    assert facade.fake.calls == []


@ENDPOINTS
async def test_bad_words_become_tokens_with_and_without_a_space(facade: Harness, path: str) -> None:
    facade.say("Fine.")
    body = body_for(path, bad_words=["Paris", "extraordinarily", " Rome"], allowed_token_ids=[9])
    status, answer, _ = await facade.post(path, body)
    assert status == 200, answer
    sampling = facade.fake.calls[0].request.sampling
    words = ("Paris", " Paris", "extraordinarily", " extraordinarily", " Rome")
    assert [tuple(i) for i in sampling.bad_token_sequences] == [
        tuple(facade.tok.encode(word)) for word in words
    ]
    assert tuple(sampling.allowed_token_ids) == (9,)


@ENDPOINTS
async def test_a_prompt_keeps_its_end(facade: Harness, path: str) -> None:
    facade.say("Fine.")
    await facade.post(path, body_for(path))
    await facade.post(path, body_for(path, truncate_prompt_tokens=2))
    whole, cut = (prompt_ids(call.request.prompt) for call in facade.fake.calls)
    assert cut == whole[-2:]
    status, answer, _ = await facade.post(path, body_for(path, truncate_prompt_tokens=0))
    check_envelope(status, answer, 400, "truncate_prompt_tokens")


@ENDPOINTS
async def test_token_ids_are_returned_when_asked_for(facade: Harness, path: str) -> None:
    said = facade.say("Fine, thanks.")
    body = body_for(path, return_token_ids=True)
    (_, whole, _), streamed = await asyncio.gather(
        facade.post(path, body), facade.stream(path, body)
    )
    assert whole["choices"][0]["token_ids"] == [*said, 2]
    assert [i for c in streamed.choice_chunks() for i in c.get("token_ids", ())] == [*said, 2]
    holder = whole["choices"][0] if path == COMPLETIONS else whole
    assert holder["prompt_token_ids"] == prompt_ids(facade.fake.calls[0].request.prompt)
    _, without, _ = await facade.post(path, body_for(path))
    assert "token_ids" not in without["choices"][0]
    assert "prompt_token_ids" not in without["choices"][0] | without
