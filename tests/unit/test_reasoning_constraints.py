"""What a constraint that waits for a thought lets a model write, by the engine's compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import xgrammar

from clients.text.reasoning import REASONING_FORMATS
from clients.types import StructuredOutput
from engine_service.grammar_compile import compile_source
from engine_service.grammar_vocabulary import read_tokenizer_info
from engine_service.messages import StructuredOutput as Source
from engine_service.structural_tag import check_structural_tag
from http_facade.constraints import Constraint
from http_facade.reasoning import ReasoningPlan

EOS = 2
VOCAB_SIZE = 49152
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = OPEN + "\n</think>\n\n"
NEUTRAL = "<|im_start|>assistant\n"

SCHEMA = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "{\\"a\\": 1}"}}'
KINDS = pytest.mark.parametrize(
    "output",
    [
        StructuredOutput(json_schema=SCHEMA),
        StructuredOutput(json_object=True),
        StructuredOutput(regex=r'\{"a": \d\}'),
        StructuredOutput(grammar='root ::= "{\\"a\\": 1}"'),
        StructuredOutput(choice=('{"a": 1}', "other")),
        StructuredOutput(structural_tag=TAG),
    ],
    ids=["schema", "object", "regex", "grammar", "choice", "tag"],
)


@pytest.fixture(scope="module")
def vocabulary(embedded_model_dir: Path) -> xgrammar.TokenizerInfo:
    return read_tokenizer_info(embedded_model_dir, VOCAB_SIZE, (EOS,))


def plan(name: str, continued: str = "") -> ReasoningPlan:
    return ReasoningPlan(REASONING_FORMATS[name], continued, waits=True)


def fits(vocabulary: xgrammar.TokenizerInfo, asked: Constraint | None, text: str) -> bool:
    assert asked is not None and asked.output.structural_tag is not None
    checked = check_structural_tag(asked.output.structural_tag)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    source = compile_source(compiler, Source("structural_tag", checked.text))
    compiled = xgrammar.CompiledGrammar.deserialize_json(source, vocabulary)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(EOS)


@KINDS
def test_the_grammar_holds_behind_the_thought(
    vocabulary: xgrammar.TokenizerInfo, output: StructuredOutput
) -> None:
    asked = Constraint("field", output)
    answers = {
        "I see {x}.\n</think>\n\n": plan("qwen3").constraint(asked, OPEN),
        "<think>\nI see.</think>": plan("qwen3").constraint(asked, NEUTRAL),
        "": plan("qwen3").constraint(asked, NEUTRAL),
        "<think>I see.</think>\n": plan("deepseek_r1").constraint(asked, NEUTRAL),
    }
    for thought, constraint in answers.items():
        assert fits(vocabulary, constraint, thought + '{"a": 1}'), thought
        assert not fits(vocabulary, constraint, thought + "no JSON"), thought
    assert not fits(vocabulary, plan("qwen3").constraint(asked, OPEN), '{"a": 1}')
    assert not fits(vocabulary, plan("qwen3").constraint(asked, OPEN), "I see.")


@KINDS
def test_without_a_thought_to_come_the_constraint_is_as_it_was(output: StructuredOutput) -> None:
    asked = Constraint("field", output)
    assert plan("qwen3").constraint(asked, CLOSED) is asked
    assert plan("qwen3", "The answer").constraint(asked, "The answer") is asked
    free = ReasoningPlan(REASONING_FORMATS["qwen3"], "", waits=False)
    assert free.constraint(asked, OPEN) is asked
    assert free.constraint(None, OPEN) is None


def test_what_is_no_structural_tag_is_left_for_the_engine_to_refuse() -> None:
    for text in ("{", "[]", '{"type": "structural_tag"}'):
        asked = Constraint("field", StructuredOutput(structural_tag=text))
        assert plan("qwen3").constraint(asked, OPEN) is asked
