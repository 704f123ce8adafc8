"""/tokenize, /detokenize and the rendered chat: the same ids as the engine gets, errors named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerBase

from http_facade.schema import MAX_TOKENIZE_CHARS
from tests.facade_harness import (
    CHAT,
    MODEL,
    Harness,
    chat,
    check_envelope,
    facade_and_fake,
    prompt_ids,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # the client's
]

TEXT = "Grüße, 世界! 👩‍👩‍👧 <|im_start|>\n\tdef f(x): return x"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
     "continue_final_message": True},
]  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("fine")
    return shared


async def ok(facade: Harness, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = await facade.post(path, body)
    assert status == 200, answer
    return answer


async def test_a_prompt_has_the_tokens_of_the_reference(
    facade: Harness, tok: PreTrainedTokenizerBase
) -> None:
    for special in (True, False):
        body = {"model": MODEL, "prompt": TEXT, "add_special_tokens": special}
        answer = await ok(facade, "/tokenize", body)
        assert answer["tokens"] == tok.encode(TEXT, add_special_tokens=special)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == facade.fake.model_info.max_model_len
        assert "token_strs" not in answer
    answer = await ok(facade, "/tokenize", {"prompt": "the cat", "return_token_strs": True})
    assert "".join(answer["token_strs"]) == "the cat"
    assert len(answer["token_strs"]) == answer["count"]
    assert (await ok(facade, "/tokenize", {"prompt": ""}))["tokens"] == []


async def test_tokens_come_back_as_the_text_they_were(facade: Harness) -> None:
    tokens = (await ok(facade, "/tokenize", {"prompt": TEXT}))["tokens"]
    assert await ok(facade, "/detokenize", {"model": MODEL, "tokens": tokens}) == {"prompt": TEXT}
    assert await ok(facade, "/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize("fields", CHATS)
async def test_messages_have_the_tokens_that_the_engine_gets(
    facade: Harness, fields: dict[str, Any]
) -> None:
    body = chat(**fields)
    await ok(facade, CHAT, body)
    sent = prompt_ids(facade.fake.requests[0].prompt)
    assert (await ok(facade, "/tokenize", body))["tokens"] == sent
    rendered = await ok(facade, f"{CHAT}/render", body)
    assert rendered["token_ids"] == sent
    assert facade.tok.decode(sent, skip_special_tokens=False) == rendered["prompt"]
    assert len(facade.fake.requests) == 1  # neither asks the engine


async def test_a_rendered_chat_is_cut_and_refused_as_the_chat_itself(facade: Harness) -> None:
    body = chat(
        truncate_prompt_tokens=5, seed=1, stream=True, reasoning_effort="low", metadata={"a": "b"}
    )
    status, rendered, headers = await facade.post(f"{CHAT}/render", body)
    assert status == 200
    assert len(rendered["token_ids"]) == 5
    assert facade.tok.encode(rendered["prompt"]) == rendered["token_ids"]
    assert set(rendered["ignored"]) == {"metadata", "reasoning_effort"}
    assert headers["x-ignored-params"] == ", ".join(rendered["ignored"])
    for field, value in (("temperature", 3), ("echo", True), ("stop", ""), ("tool_choice", "auto")):
        for path in (CHAT, f"{CHAT}/render"):
            status, answer, _ = await facade.post(path, chat(**{field: value}))
            check_envelope(status, answer, 400, field)
    long = chat(messages=[{"role": "user", "content": "many words " * 9000}])
    status, answer, _ = await facade.post(f"{CHAT}/render", long)
    assert check_envelope(status, answer, 400, "messages")["code"] == "context_length_exceeded"
    assert facade.fake.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": chat()["messages"]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a" * (MAX_TOKENIZE_CHARS + 1)}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": False}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": 7}, "model"),
        ("/tokenize", chat(add_special_tokens=True), "add_special_tokens"),
        ("/tokenize", chat(messages=[]), "messages"),
        ("/tokenize", chat(messages=[{"role": "wizard"}]), "messages[0].role"),
        ("/tokenize", chat(tool_choice="required"), "tool_choice"),
        ("/tokenize", chat(add_generation_prompt=True, continue_final_message=True),
         "continue_final_message"),
        ("/tokenize", chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        ("/tokenize", chat(messages=[{"role": "user", "content": "a" * MAX_TOKENIZE_CHARS}]),
         "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 1.5]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 49_152]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 2**31]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1] * 1_000_001}, "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
async def test_what_can_not_be_taken_is_named(
    facade: Harness, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = await facade.post(path, body)
    check_envelope(status, answer, 400, param)


async def test_models_and_unknown_fields_are_as_everywhere(facade: Harness) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        (f"{CHAT}/render", chat()),
    ):
        status, answer, _ = await facade.post(path, {**body, "model": "none"})
        assert check_envelope(status, answer, 404, "model")["code"] == "model_not_found"
        status, _, headers = await facade.post(path, {**body, "model": MODEL, "no_such": 1})
        assert (status, headers["x-ignored-params"]) == (200, "no_such")
    # what only generation knows changes no token
    _, _, headers = await facade.post("/tokenize", chat(temperature=1, stream=True))
    assert headers["x-ignored-params"] == "temperature, stream"


async def test_a_tool_that_can_not_be_called_is_refused_as_in_a_chat(facade: Harness) -> None:
    body = chat(tools=[{"type": "web_search"}])
    for path in (CHAT, "/tokenize"):
        status, answer, _ = await facade.post(path, body)
        check_envelope(status, answer, 400, "tools[0].type")
