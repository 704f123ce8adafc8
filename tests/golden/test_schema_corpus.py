"""Whatever ends with `stop` under a schema validates: by the model at a high temperature, by random
tokens through the matcher alone, and with preemptions in between."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import xgrammar
from tokenizers import Tokenizer

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.core_process import build_core
from engine_service.grammar_vocabulary import read_tokenizer_info
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AddRequest,
    CoreStats,
    FinishReason,
    Frame,
    SamplingParams,
    StepFrame,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.schema_check import check_schema
from scripts.schema_keywords import ROWS, decision
from tests.grammar_samples import GrammarSampler
from tests.schema_corpus import CORPUS, Schema

VOCAB = 49152
EOS = 2
MAX_TOKENS = 250
PROMPT = "Give one more example, as JSON, with unusual values.\n"


def complaint(name: str, schema: Schema, text: str) -> str | None:
    """Why a text breaks its schema; None: it does not."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{name}: {text!r} is no JSON: {error}"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    broken = next(validator.iter_errors(value), None)
    return None if broken is None else f"{name}: {text!r}: {broken.message}"


# ---------------------------------------------------------------- by random tokens


def sample_all(
    model_dir: Path, schemas: dict[str, Schema], samples: int, seed: int, ending: float = 0.9
) -> None:
    tokenizer = read_tokenizer_info(model_dir, VOCAB, (EOS,))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    sampler = GrammarSampler(tokenizer, seed)
    ended = 0
    complaints: list[str] = []
    for name, schema in schemas.items():
        grammar = compiler.compile_grammar(check_schema(json.dumps(schema)).grammar)
        for _ in range(samples):
            text = sampler.sample(grammar, MAX_TOKENS)
            if text is None:
                continue
            ended += 1
            complaints += filter(None, [complaint(name, schema, text.decode())])
    assert complaints == []
    assert ended >= ending * samples * len(schemas)


def test_random_tokens_make_valid_documents(embedded_model_dir: Path) -> None:
    some = dict(list(CORPUS.items())[::3])
    sample_all(embedded_model_dir, some, samples=2, seed=1)


def test_what_the_page_calls_enforced_is(embedded_model_dir: Path) -> None:
    """docs/json_schema.md: its examples, each of which it says is enforced or is not."""
    enforced: dict[str, Schema] = {
        f"{row.keyword} {i}": row.example
        for i, row in enumerate(ROWS)
        if decision(row) == "enforced"
    }
    assert len(enforced) > 40
    # Some of them bound nothing else, and ramble.
    sample_all(embedded_model_dir, enforced, samples=3, seed=2, ending=0.7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_many_random_tokens_make_valid_documents(embedded_model_dir: Path, seed: int) -> None:
    sample_all(embedded_model_dir, CORPUS, samples=40, seed=seed)


# ---------------------------------------------------------------- by the model


class Channel:
    """Keeps the frames."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.frames: list[StepFrame] = []

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        self.frames.append(frame)


def generate(
    model_dir: Path, names: list[str], num_blocks: int, seed: int, copies: int
) -> tuple[dict[str, tuple[list[int], FinishReason]], CoreStats]:
    """Outputs of each schema by request id, all in the core at once; an id ends in the name."""
    config = CoreConfig(
        model=ModelConfig(str(model_dir), "model"),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=32),
        num_threads=2,
        check_integrity=True,
    )
    channel = Channel()
    core, _ = build_core(config, channel)
    prompt = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(PROMPT).ids
    request_ids = [f"{copy}/{name}" for name in names for copy in range(copies)]
    channel.mailbox.put(
        [
            AddRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=1.5, seed=seed + i),
                stopping=StoppingCriteria(max_tokens=MAX_TOKENS, eos_token_ids=(EOS,)),
                structured_output=StructuredOutput(
                    "json_schema", json.dumps(CORPUS[name_of(request_id)])
                ),
                arrival_ns=i,
            )
            for i, request_id in enumerate(request_ids)
        ]
    )
    said: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    ends: dict[str, FinishReason] = {}
    while len(ends) < len(request_ids):
        if not core.step():
            time.sleep(0.005)  # all that is left waits for its grammar
        for frame in channel.frames:
            for output in frame.outputs:
                said[output.request_id].extend(output.new_token_ids)
                if output.finish is not None:
                    assert output.finish.failure is None, (output.request_id, output.finish)
                    ends[output.request_id] = output.finish.reason
        stats = channel.frames[-1].stats if channel.frames else None
        channel.frames.clear()
    assert stats is not None
    return {each: (said[each], ends[each]) for each in request_ids}, stats


def name_of(request_id: str) -> str:
    return request_id.partition("/")[2]


def assert_valid(
    model_dir: Path, names: list[str], num_blocks: int, seed: int, copies: int = 1
) -> CoreStats:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    outputs, stats = generate(model_dir, names, num_blocks, seed, copies)
    assert Counter(reason for _, reason in outputs.values()).keys() <= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    ended = {each: ids for each, (ids, reason) in outputs.items() if reason is FinishReason.STOP}
    complaints = [
        complaint(each, CORPUS[name_of(each)], tokenizer.decode(ids)) for each, ids in ended.items()
    ]
    assert list(filter(None, complaints)) == []
    assert len(ended) >= 0.9 * len(outputs)
    return stats


@pytest.mark.timeout(240)
def test_a_hot_model_writes_valid_documents(embedded_model_dir: Path) -> None:
    assert_valid(embedded_model_dir, list(CORPUS)[::8], num_blocks=2_000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [100, 1000])
def test_a_hot_model_writes_valid_documents_for_all(embedded_model_dir: Path, seed: int) -> None:
    stats = assert_valid(embedded_model_dir, list(CORPUS), num_blocks=2_000, seed=seed)
    assert stats.num_preemptions == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hot_model_writes_valid_documents_though_preempted(embedded_model_dir: Path) -> None:
    """Blocks for one request at its longest, and for little more."""
    names = list(CORPUS)[1::2]
    stats = assert_valid(embedded_model_dir, names, num_blocks=20, seed=7, copies=4)
    assert stats.num_preemptions > 0
