"""Every field of the official SDK's request types has a decision, also inside objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import pytest_asyncio
from openai.types.chat import completion_create_params
from typing_extensions import is_typeddict

from http_facade.decode import inner_structs
from http_facade.schema import ChatRequest
from tests.facade_harness import CHAT, Harness, chat, check_envelope, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"type": "function", "function": {"name": "f"}}


def user(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*chat()["messages"], {"role": "assistant", "content": "Well", **fields}]}


def part(type: str, **fields: Any) -> dict[str, Any]:
    return user(content=[{"type": type, **fields}])


def call(**fields: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"id": "c", "type": "custom", **fields}])


# What is not in our Structs, by its path: a request with it, and the path that is named.
IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    "messages.refusal": (assistant(refusal="No"), "messages[1].refusal"),
    "messages.content.prompt_cache_breakpoint": (
        part("text", text="Hi", prompt_cache_breakpoint={"mode": "explicit"}),
        "messages[0].content[0].prompt_cache_breakpoint",
    ),
    "stream_options.include_obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        "stream_options.include_obfuscation",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "messages.audio": (assistant(audio={"id": "a"}), "messages[1].audio"),
    "messages.function_call": (
        assistant(function_call={"name": "f", "arguments": "{}"}),
        "messages[1].function_call",
    ),
    "messages.content.image_url": (
        part("image_url", image_url={"url": "http://localhost/x.png"}),
        "messages[0].content",
    ),
    "messages.content.input_audio": (part("input_audio", input_audio={}), "messages[0].content"),
    "messages.content.file": (part("file", file={}), "messages[0].content"),
    "messages.content.refusal": (part("refusal", refusal="No"), "messages[0].content"),
    "messages.tool_calls.custom": (
        call(custom={"name": "f", "input": ""}),
        "messages[1].tool_calls[0].type",
    ),
    "tools.custom": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "tool_choice.custom": (
        {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice",
    ),
    "tool_choice.allowed_tools": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice",
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


def undecided(sdk_type: Any, struct: Any, path: str) -> Iterator[str]:
    """The paths of the fields that the SDK's type has and the Struct has not."""
    if not is_typeddict(sdk_type):
        for one in get_args(sdk_type):
            yield from undecided(one, struct, path)
        return
    for name, field_type in get_type_hints(sdk_type).items():
        where = f"{path}.{name}" if path else name
        if name not in struct.__struct_fields__:
            yield where
        elif (inner := inner_structs(struct).get(name)) is not None:
            yield from undecided(field_type, inner, where)


async def test_the_fields_inside_objects_are_all_decided() -> None:
    sdk_type = completion_create_params.CompletionCreateParamsStreaming
    found = {path for path in undecided(sdk_type, ChatRequest, "") if "." in path}
    assert found == {*IGNORED, *REFUSED}


@pytest.mark.parametrize("path", sorted(IGNORED))
async def test_fields_inside_objects_are_ignored_and_named(facade: Harness, path: str) -> None:
    fields, param = IGNORED[path]
    status, answer, headers = await facade.post(f"{CHAT}/render", chat(**fields))
    assert status == 200, answer
    assert answer["ignored"] == [param]
    assert headers["x-ignored-params"] == param


@pytest.mark.parametrize("path", sorted(REFUSED))
async def test_fields_inside_objects_are_refused_and_named(facade: Harness, path: str) -> None:
    fields, param = REFUSED[path]
    status, answer, _ = await facade.post(f"{CHAT}/render", chat(**fields))
    check_envelope(status, answer, 400, param)


async def test_no_answer_of_the_sdk_is_refused_as_history(facade: Harness) -> None:
    """Clients send back what they got, with all its fields."""
    facade.say("fine")
    _, answer, _ = await facade.post(CHAT, chat())
    message = answer["choices"][0]["message"]
    told = {**message, "function_call": None, "audio": None, "tool_calls": None, "annotations": []}
    body = chat(messages=[*chat()["messages"], told, *chat()["messages"]])
    status, _, headers = await facade.post(f"{CHAT}/render", body)
    assert (status, headers.get("x-ignored-params")) == (200, "messages[1].annotations")
