"""CASES D1, D5, D6, P1, P3 on the real server: characters, special tokens, stop strings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.serving import Served, Stream, post, stream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNICODE = "🌶️ 👩‍👩‍👧 ďábel 漢字 नमस्ते"


def forced(served: Served, value: str, **fields: Any) -> dict[str, Any]:
    """L1: a chat whose only possible answer is {"v": value}."""
    schema = {
        "type": "object",
        "properties": {"v": {"type": "string", "enum": [value]}},
        "required": ["v"],
        "additionalProperties": False,
    }
    return {
        "model": served.model,
        "messages": [{"role": "user", "content": "Say it."}],
        "temperature": 0,
        "max_tokens": 120,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "forced", "strict": True, "schema": schema},
        },
        **fields,
    }


async def both(served: Served, path: str, body: dict[str, Any]) -> tuple[Stream, dict[str, Any]]:
    streamed, (status, whole, _) = await asyncio.gather(
        stream(served.http, path, body), post(served.http, path, body)
    )
    assert status == streamed.status == 200, whole
    return streamed, whole


async def test_d1_characters_split_over_tokens(served: Served) -> None:
    streamed, whole = await both(served, CHAT, forced(served, UNICODE))
    content = whole["choices"][0]["message"]["content"]
    assert json.loads(content) == {"v": UNICODE}
    assert streamed.text() == content
    assert not any("�" in delta for delta in streamed.deltas())
    assert streamed.finish_reasons() == ["stop"]

    total = whole["usage"]["completion_tokens"]
    for start in range(1, total, 8):
        cuts = await asyncio.gather(
            *(
                both(served, CHAT, forced(served, UNICODE, max_tokens=k))
                for k in range(start, min(start + 8, total))
            )
        )
        for k, (cut_stream, cut_whole) in enumerate(cuts, start):
            text = cut_whole["choices"][0]["message"]["content"]
            assert cut_stream.text() == text
            assert "�" not in text[:-1]
            assert content.startswith(text.rstrip("�"))
            assert cut_whole["usage"]["completion_tokens"] == k


async def test_d5_logprob_bytes_are_the_tokens_bytes(served: Served) -> None:
    body = forced(served, UNICODE, logprobs=True, top_logprobs=5)
    streamed, whole = await both(served, CHAT, body)
    choice = whole["choices"][0]
    entries = choice["logprobs"]["content"]
    content = choice["message"]["content"].encode()
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.startswith(content)
    assert joined.removeprefix(content) in (b"", b"<|im_end|>")
    for entry in entries:
        assert len(entry["top_logprobs"]) == 5
        assert all(top["bytes"] != [239, 191, 189] for top in entry["top_logprobs"])
    sent = [
        entry
        for chunk in streamed.choice_chunks()
        if chunk.get("logprobs")
        for entry in chunk["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in sent] == [entry["bytes"] for entry in entries]


async def test_d6_special_tokens_and_whitespace(
    served: Served, tok: PreTrainedTokenizerBase
) -> None:
    eos = tok.eos_token_id
    marker = tok.convert_ids_to_tokens(eos)
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "logit_bias": {str(eos): 100},
        "ignore_eos": True,
        "max_tokens": 4,
    }
    for skip, expected in ((True, ""), (False, marker * 4)):
        streamed, whole = await both(served, CHAT, {**body, "skip_special_tokens": skip})
        assert whole["choices"][0]["message"]["content"] == streamed.text() == expected
        assert whole["usage"]["completion_tokens"] == 4

    value = "a    b\n\n\n  c\t\td "
    streamed, whole = await both(served, CHAT, forced(served, value))
    assert json.loads(streamed.text()) == {"v": value}
    assert whole["choices"][0]["message"]["content"] == streamed.text()

    body = {"model": served.model, "prompt": "The capital of France is", "max_tokens": 1}
    streamed, whole = await both(served, COMPLETIONS, {**body, "temperature": 0})
    assert whole["choices"][0]["text"] == streamed.text() == " Paris"


async def test_p1_no_part_of_a_stop_string_is_sent(served: Served) -> None:
    body = forced(served, "ABCDEFGHIJK", stop=["DEFGHIJ"])
    streamed, whole = await both(served, CHAT, body)
    text = whole["choices"][0]["message"]["content"]
    assert text.endswith("ABC")
    assert streamed.text() == text
    assert not any(letter in delta for delta in streamed.deltas() for letter in "DEFGHIJ")
    assert streamed.finish_reasons() == ["stop"] == [whole["choices"][0]["finish_reason"]]
    assert whole["choices"][0]["stop_reason"] == "DEFGHIJ"


async def test_p3_only_a_possible_stop_string_is_held_back(served: Served) -> None:
    body = {
        "model": served.model,
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    plain = await stream(served.http, COMPLETIONS, body)
    stopped = await stream(served.http, COMPLETIONS, {**body, "stop": ["q" * 200]})
    assert stopped.text() == plain.text()
    assert abs(len(stopped.deltas()) - len(plain.deltas())) <= 1
