"""Every format's parser on every cut of its texts: what is told does not depend on the cuts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clients.text import Tokenizer
from clients.text.tool_parsers import TOOL_FORMATS, ToolFormat, WrittenCall
from tests.text_samples import embedded_tokenizer
from tests.tool_samples import HARD_ARGUMENTS, NAMES, Read, read_events

FORMATS = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS.keys())


def write(tool_format: ToolFormat, *calls: tuple[str, object]) -> str:
    written = [WrittenCall(name, json.dumps(a, ensure_ascii=False)) for name, a in calls]
    return tool_format.write(written)


def read(tool_format: ToolFormat, pieces: Sequence[str]) -> Read:
    parser = tool_format.parser(NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return read_events(events + parser.finish())


def cuts(text: str) -> Iterator[list[str]]:
    """In one piece, in characters, in pieces of 2 to 7, and in two at every place."""
    yield [text]
    for size in range(1, 8):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def read_every_cut(tool_format: ToolFormat, text: str) -> Read:
    whole = read(tool_format, [text])
    for pieces in cuts(text):
        assert read(tool_format, pieces) == whole, pieces
    return whole


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


# ---------------------------------------------------------------- all formats


@FORMATS
@pytest.mark.parametrize("arguments", HARD_ARGUMENTS, ids=json.dumps)
def test_arguments_come_out_as_they_went_in(
    tool_format: ToolFormat, arguments: dict[str, object]
) -> None:
    result = read_every_cut(tool_format, write(tool_format, ("f", arguments)))
    assert result.content == ""
    assert [name for name, _ in result.calls] == ["f"]
    assert result.arguments == [arguments]
    assert result.num_complete == 1


@FORMATS
def test_calls_come_in_the_order_of_the_text(tool_format: ToolFormat) -> None:
    text = write(tool_format, ("get_time", {"zone": "CET"}), ("get_weather", {}), ("f", {"n": 1}))
    result = read_every_cut(tool_format, text)
    assert result.order == ["get_time", "get_weather", "f"]
    assert result.arguments == [{"zone": "CET"}, {}, {"n": 1}]
    assert (result.content, result.num_complete) == ("", 3)


@FORMATS
def test_bunches_of_tokens(tool_format: ToolFormat, tokenizer: Tokenizer) -> None:
    calls = [("f", arguments) for arguments in HARD_ARGUMENTS]
    text = "Here: " + write(tool_format, *calls)
    tokens = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    whole = read(tool_format, [text])
    assert whole.arguments == list(HARD_ARGUMENTS)
    for size in range(1, 6):
        bunches = [b"".join(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        try:
            pieces = [bunch.decode() for bunch in bunches]
        except UnicodeDecodeError:  # the detokenizer's business
            continue
        assert read(tool_format, pieces) == whole


@FORMATS
def test_content_beside_calls_is_kept_without_the_spaces_between(tool_format: ToolFormat) -> None:
    call = write(tool_format, ("f", {"n": 1}))
    result = read_every_cut(tool_format, f"  Let me look.\n\n{call}\n\nDone, <all> [of] {{it}}. ")
    assert result.content == "  Let me look.Done, <all> [of] {it}. "
    assert result.order == ["content", "f", "content"]
    assert read_every_cut(tool_format, f" \n{call}\n ").content == ""


@FORMATS
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "Hello there. ",
        "a < b, [c] and {d}",
        "<",
        "<tool",
        "<tool_call",
        "[TOOL_CALLS",
        '{"name',
        '{"name": "Bob", "parameters": 5}',
        '[{"name": "f", "arguments": {}}]',
        "see [g(1)] and [f] (x)",
        "<tool_call>no call</tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]',
        '[TOOL_CALLS] "f"',
        "[unknown(a=1)]",
        '<tool_call>{"name": "' + "x" * 1000,
        "<tool_call>" + " " * 1000 + '{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_is_content(tool_format: ToolFormat, text: str) -> None:
    result = read_every_cut(tool_format, text)
    assert (result.content, result.calls) == (text, [])


@FORMATS
def test_a_cut_call_has_its_arguments_as_far_as_they_came(tool_format: ToolFormat) -> None:
    arguments = json.dumps({"s": "some text", "n": [1, 2]})
    call = write(tool_format, ("f", {"s": "some text", "n": [1, 2]}))
    for end in range(len(call)):
        result = read(tool_format, list(call[:end]))
        if not result.calls:  # cut before the arguments: nothing of the text is lost
            assert result.content == call[:end]
            continue
        ((name, partial),) = result.calls
        assert (name, result.content) == ("f", "")
        assert arguments.startswith(partial)
        assert result.num_complete == (partial == arguments)


@FORMATS
def test_text_is_held_back_only_where_a_call_may_begin(tool_format: ToolFormat) -> None:
    parser = tool_format.parser(NAMES)
    told = ""
    for character in "No marker here. Is 1 < 2? [Yes] {so}: ok":
        told += read_events(parser.push(character)).content
    assert told == "No marker here. Is 1 < 2? [Yes] {so}: ok"


@FORMATS
def test_arguments_are_told_as_they_come(tool_format: ToolFormat) -> None:
    call = write(tool_format, ("f", {"text": "word " * 50}))
    parser = tool_format.parser(NAMES)
    deltas = [parser.push(character) for character in call]
    assert sum(1 for events in deltas if events) > 250


def test_ids_are_unique_and_such_as_the_templates_take() -> None:
    for tool_format in TOOL_FORMATS.values():
        ids = {tool_format.new_call_id() for _ in range(1000)}
        assert len(ids) == 1000
    assert all(len(i) == 9 and i.isalnum() for i in [TOOL_FORMATS["mistral"].new_call_id()])


# ---------------------------------------------------------------- what models write


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
            '<tool_call> {"name" : "ping" , "arguments" : {} } </tool_call>',
            [("f", {"a": 1}), ("ping", {})],
        ),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "ping", "parameters": {}}',
            [("f", {"a": 1}), ("ping", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name":"ping","arguments":{}}]',
            [("f", {"a": [1]}), ("ping", {})],
        ),
        (
            "pythonic",
            "[f(a=1, b='it\\'s', c=[1, (2,)], d={'x': None}), get_time(), ping(on=True,)]",
            [
                ("f", {"a": 1, "b": "it's", "c": [1, [2]], "d": {"x": None}}),
                ("get_time", {}),
                ("ping", {"on": True}),
            ],
        ),
        (
            "pythonic",
            '[f(s="a, b) c]", n = -1.5, z=null)]',
            [("f", {"s": "a, b) c]", "n": -1.5, "z": None})],
        ),
        (
            "pythonic",
            "[f(x=sin(1, 2), y=NaN, z=b'b', v='')]",
            [("f", {"x": "sin(1, 2)", "y": "NaN", "z": "b'b'", "v": ""})],
        ),
        ("pythonic", "[f('Paris', n=2)]", [("f", {"0": "Paris", "n": 2})]),
        (
            "pythonic",
            '[f(**{"a": 1}), f( ** {"b": [")"]})]',
            [("f", {"a": 1}), ("f", {"b": [")"]})],
        ),
    ],
)
def test_texts_of_models(name: str, text: str, calls: list[tuple[str, object]]) -> None:
    result = read_every_cut(TOOL_FORMATS[name], text)
    assert list(zip([n for n, _ in result.calls], result.arguments, strict=True)) == calls
    assert (result.content, result.num_complete) == ("", len(calls))
