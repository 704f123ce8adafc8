"""Calls between special tokens of a vocabulary: a model may write them, and they are seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import xgrammar
from tokenizers import AddedToken

from clients.text import Tokenizer
from clients.text.tool_parsers import TOOL_FORMATS, Tool, ToolFormat, WrittenCall
from engine_service.grammar_vocabulary import read_tokenizer_info
from http_facade.tools import special_markers
from tests.text_samples import embedded_backend

EOS = 2
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
OTHER = "<|other|>"  # special, too
FORMATS = pytest.mark.parametrize("name", ["mistral", "mistral_v11", "hermes", "generic"])
FORCED = pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "auto"])
NOTHING: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    Tool("ping", NOTHING),
)
CALL = WrittenCall("f", '{"a": "<tool_call>[TOOL_CALLS] [x]</tool_call>"}')
PING = WrittenCall("ping", "{}")


@pytest.fixture(scope="module")
def model_dir(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has the markers as special tokens, as Mistral's and some of Hermes' have."""
    backend = embedded_backend(embedded_model_dir)
    backend.add_special_tokens([AddedToken(one, special=True) for one in (*MARKERS, OTHER)])
    directory = tmp_path_factory.mktemp("special")
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")))


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path, tokenizer: Tokenizer) -> xgrammar.TokenizerInfo:
    return read_tokenizer_info(model_dir, tokenizer.vocab_size, (EOS,))


@pytest.fixture(scope="module")
def compiler(vocabulary: xgrammar.TokenizerInfo) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1)


def grammar(
    compiler: xgrammar.GrammarCompiler,
    tokenizer: Tokenizer,
    tool_format: ToolFormat,
    *,
    is_forced: bool,
    parallel: bool = True,
) -> xgrammar.CompiledGrammar:
    document = tool_format.structural_tag(
        TOOLS,
        is_forced=is_forced,
        parallel=parallel,
        special_ids=special_markers(tool_format, tokenizer),
    )
    text = json.dumps(document)
    # as the engine bounds it
    bounded = text.replace('"json_schema": {', '"max_whitespace_cnt": 1, "json_schema": {')
    return compiler.compile_structural_tag(bounded)


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a model writes it: markers around calls are one token each, those within a string not."""
    head, *rest = text.split('"a": "')
    ids = tokenizer.encode(head, add_special_tokens=False)
    for part in rest:
        inside, quote, outside = part.partition('"')
        ids += tokenizer.encode('"a": "', add_special_tokens=False)
        for character in inside:
            ids += tokenizer.encode(character, add_special_tokens=False)
        ids += tokenizer.encode(quote + outside, add_special_tokens=False)
    return ids


def is_whole_answer(compiled: xgrammar.CompiledGrammar, ids: list[int]) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(token_id) for token_id in [*ids, EOS])


@FORMATS
@FORCED
def test_the_models_own_tokens_may_be_written(
    compiler: xgrammar.GrammarCompiler, tokenizer: Tokenizer, name: str, is_forced: bool
) -> None:
    tool_format = TOOL_FORMATS[name]
    assert special_markers(tool_format, tokenizer).keys() == set(tool_format.markers)
    compiled = grammar(compiler, tokenizer, tool_format, is_forced=is_forced)
    for calls in ([PING], [CALL], [CALL, PING]):
        ids = token_ids(tokenizer, tool_format.write(calls))
        assert tokenizer.special_id(tool_format.markers[0]) == ids[0]
        assert is_whole_answer(compiled, ids)
    call = token_ids(tokenizer, tool_format.write([PING]))
    assert is_whole_answer(compiled, [*tokenizer.encode("Well.\n"), *call]) != is_forced
    assert is_whole_answer(compiled, tokenizer.encode("No.")) != is_forced
    unknown = tool_format.write([replace(PING, name="pong")])
    assert not is_whole_answer(compiled, token_ids(tokenizer, unknown))
    single = grammar(compiler, tokenizer, tool_format, is_forced=is_forced, parallel=False)
    assert is_whole_answer(single, call)
    assert not is_whole_answer(single, token_ids(tokenizer, tool_format.write([PING, PING])))


def test_they_come_through_from_the_process_that_compiles(
    compiler: xgrammar.GrammarCompiler, tokenizer: Tokenizer, vocabulary: xgrammar.TokenizerInfo
) -> None:
    mistral = TOOL_FORMATS["mistral"]
    sent = grammar(compiler, tokenizer, mistral, is_forced=True).serialize_json()
    compiled = xgrammar.CompiledGrammar.deserialize_json(sent, vocabulary)
    assert is_whole_answer(compiled, token_ids(tokenizer, mistral.write([PING])))


@FORMATS
def test_no_special_token_stands_for_text(
    compiler: xgrammar.GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    """Neither in the text beside calls nor in their arguments, nor where no call was asked for."""
    tool_format = TOOL_FORMATS[name]
    auto = grammar(compiler, tokenizer, tool_format, is_forced=False)
    specials = [tokenizer.special_id(one) for one in (*MARKERS, OTHER)]
    assert None not in specials
    begin = tokenizer.special_id(tool_format.markers[0])
    string = compiler.compile_json_schema('{"type": "string"}')
    quote = tokenizer.encode('"')
    written = token_ids(tokenizer, tool_format.write([CALL]))
    for token_id in specials:
        assert token_id is not None
        if token_id != begin:
            assert not is_whole_answer(auto, [*tokenizer.encode("Well."), token_id])
        assert not is_whole_answer(string, [*quote, token_id, *quote])
        for place in range(1, len(written)):
            if written[place] != token_id:
                broken = [*written[:place], token_id, *written[place:]]
                assert not is_whole_answer(auto, broken), place
