"""What each format's structural tag lets a model write, asked of the real grammar compiler."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import xgrammar

from clients.text import Tokenizer
from clients.text.tool_parsers import TOOL_FORMATS, Tool, ToolFormat, WrittenCall
from engine_service.grammar_vocabulary import read_tokenizer_info
from tests.text_samples import embedded_tokenizer
from tests.tool_samples import Read, read_events

FORMATS = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS.keys())
PARALLEL = pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
EOS = 2
VOCAB_SIZE = 49152

CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", 'a"}]']}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get_weather", CITY), Tool("ping", NOTHING))
NAMES = [tool.name for tool in TOOLS]


@pytest.fixture(scope="module")
def compiler(embedded_model_dir: Path) -> xgrammar.GrammarCompiler:
    info = read_tokenizer_info(embedded_model_dir, VOCAB_SIZE, (EOS,))
    return xgrammar.GrammarCompiler(info, max_threads=1)


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


def grammar(
    compiler: xgrammar.GrammarCompiler, tool_format: ToolFormat, *, is_forced: bool, parallel: bool
) -> xgrammar.CompiledGrammar:
    document = json.dumps(tool_format.structural_tag(TOOLS, is_forced=is_forced, parallel=parallel))
    # as the engine bounds it
    bounded = document.replace('"json_schema": {', '"max_whitespace_cnt": 1, "json_schema": {')
    return compiler.compile_structural_tag(bounded)


def is_whole_answer(compiled: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(EOS)


def write(tool_format: ToolFormat, *calls: tuple[str, object]) -> str:
    return tool_format.write([WrittenCall(name, json.dumps(value)) for name, value in calls])


def several(tool_format: ToolFormat) -> str:
    """Two calls, as a constrained model writes them."""
    calls: list[tuple[str, object]] = [("get_weather", {"city": "Paris"}), ("ping", {})]
    if tool_format.name == "pythonic":
        return "\n".join(write(tool_format, call) for call in calls)
    return write(tool_format, *calls)


@FORMATS
@PARALLEL
@pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "auto"])
def test_calls_fit(
    compiler: xgrammar.GrammarCompiler, tool_format: ToolFormat, is_forced: bool, parallel: bool
) -> None:
    compiled = grammar(compiler, tool_format, is_forced=is_forced, parallel=parallel)
    assert is_whole_answer(compiled, write(tool_format, ("get_weather", {"city": 'a"}]'})))
    assert is_whole_answer(compiled, write(tool_format, ("ping", {})))
    assert not is_whole_answer(compiled, write(tool_format, ("get_weather", {"city": "Rome"})))
    assert not is_whole_answer(compiled, write(tool_format, ("get_weather", {})))
    assert is_whole_answer(compiled, several(tool_format)) == parallel


@FORMATS
def test_only_auto_lets_the_model_say_something_else(
    compiler: xgrammar.GrammarCompiler, tool_format: ToolFormat
) -> None:
    call = write(tool_format, ("ping", {}))
    auto = grammar(compiler, tool_format, is_forced=False, parallel=True)
    forced = grammar(compiler, tool_format, is_forced=True, parallel=True)
    for text in ("", "It rains. ", f"Let me look.\n{call}"):
        assert is_whole_answer(auto, text)
        assert not is_whole_answer(forced, text)


def read(tool_format: ToolFormat, text: str) -> Read:
    parser = tool_format.parser(NAMES)
    return read_events([*parser.push(text), *parser.finish()])


def random_answer(compiled: xgrammar.CompiledGrammar, tokenizer: Tokenizer, seed: int) -> str:
    """Drawn evenly from what the grammar allows; it ends as soon as it may."""
    chance = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    ids: list[int] = []
    while len(ids) < 1000:
        matcher.fill_next_token_bitmask(bitmask)
        allowed = np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little"))
        if EOS in allowed:
            return tokenizer.decode(ids)
        ids.append(int(chance.choice(allowed)))
        assert matcher.accept_token(ids[-1])
    raise AssertionError(f"no end: {tokenizer.decode(ids)}")


@FORMATS
def test_whatever_a_forced_model_writes_is_calls_that_validate(
    compiler: xgrammar.GrammarCompiler, tokenizer: Tokenizer, tool_format: ToolFormat
) -> None:
    compiled = grammar(compiler, tool_format, is_forced=True, parallel=True)
    for seed in range(3):
        text = random_answer(compiled, tokenizer, seed)
        answer = read(tool_format, text)
        assert answer.content == ""
        assert answer.num_complete == len(answer.calls) >= 1, text
        for (name, _), arguments in zip(answer.calls, answer.arguments, strict=True):
            assert isinstance(arguments, dict)
            if name == "ping":
                assert arguments == {}
            else:
                assert arguments.keys() <= {"city", "days"}
                assert arguments["city"] in ("Paris", 'a"}]')
                assert type(arguments.get("days", 0)) is int and arguments.get("days", 0) <= 9
