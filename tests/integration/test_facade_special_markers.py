"""Calls whose marks are special tokens of the model: asked for by id, and seen in what comes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.facade_harness import CHAT, Harness, chat, facade_and_fake
from tests.serving import Stream
from tests.text_samples import embedded_backend

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
OTHER = "<|other|>"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("first", "second")
]
LISTED = (
    '[TOOL_CALLS] [{"name": "first", "arguments": {"n": [1]}}, {"name": "second", "arguments": {}}]'
)
BETWEEN = (
    '<tool_call>\n{"name": "first", "arguments": {"n": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "second", "arguments": {}}\n</tool_call>'
)
ANSWERS = pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", LISTED),
        ("mistral_v11", '[TOOL_CALLS]first[ARGS]{"n": [1]}[TOOL_CALLS]second[ARGS]{}'),
        ("hermes", BETWEEN),
        ("generic", BETWEEN),
    ],
)


@pytest.fixture(scope="module")
def model_dir(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("special")
    for path in embedded_model_dir.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, directory)
    backend = embedded_backend(embedded_model_dir)
    backend.add_special_tokens([AddedToken(one, special=True) for one in (*MARKERS, OTHER)])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def streamed(answer: Stream) -> tuple[str, list[tuple[str, Any]]]:
    content, names, arguments = "", [], [""] * 9
    for choice in answer.choice_chunks():
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            names += [delta["function"]["name"]] if "id" in delta else []
            arguments[delta["index"]] += delta["function"]["arguments"]
    return content, [(name, json.loads(arguments[i])) for i, name in enumerate(names)]


def say(facade: Harness, text: str) -> list[int]:
    """A token at a time."""
    token_ids = facade.say(text)
    for one in (*MARKERS, OTHER):  # each is one token
        token_id = facade.tok.special_id(one)
        assert token_id is not None and token_ids.count(token_id) == text.count(one)
    return token_ids


@ANSWERS
async def test_calls_are_seen_and_no_mark_is(model_dir: Path, parser: str, text: str) -> None:
    async with facade_and_fake(model_dir, tool_call_parser=parser) as facade:
        say(facade, f"Well{OTHER}. {text}")
        expected = [("first", {"n": [1]}), ("second", {})]
        _, whole, _ = await facade.post(CHAT, chat(tools=TOOLS))
        message = whole["choices"][0]["message"]
        assert (message["content"], calls_of(message)) == ("Well.", expected)
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        answer = await facade.stream(CHAT, chat(tools=TOOLS))
        assert streamed(answer) == ("Well.", expected)


@ANSWERS
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_the_engine_is_asked_for_the_tokens(
    model_dir: Path, parser: str, text: str, choice: str
) -> None:
    async with facade_and_fake(model_dir, tool_call_parser=parser) as facade:
        say(facade, text)
        await facade.post(CHAT, chat(tools=TOOLS, tool_choice=choice))
        asked = facade.fake.calls[-1].request.structured_output
        assert asked is not None and asked.structural_tag is not None
        for marker in MARKERS:
            token_id = facade.tok.special_id(marker)
            by_id = json.dumps({"type": "token", "token": token_id}, separators=(",", ":"))
            assert (by_id in asked.structural_tag) == (marker in text)
            assert marker not in asked.structural_tag


async def test_without_tools_the_marks_stay_hidden(model_dir: Path) -> None:
    async with facade_and_fake(model_dir, tool_call_parser="mistral") as facade:
        say(facade, f"Well{OTHER}. [TOOL_CALLS]")
        _, whole, _ = await facade.post(CHAT, chat())
        assert whole["choices"][0]["message"]["content"] == "Well. "
