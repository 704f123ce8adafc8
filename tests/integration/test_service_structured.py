"""Structured output over gRPC, with real processes: each kind of constraint, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import Answer, Client, Engine, engine_process, request

SECONDS = 2.0  # in which what is hostile must be refused

NUMBER_CALL = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {
                "type": "json_schema",
                "json_schema": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 22]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
            "end": "</call>",
        },
    }
)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--num-gpu-blocks-override=1024", "--grammar-compile-timeout=2")
    with engine_process(model_dir, tmp_path_factory.mktemp("engine"), *flags) as running:
        yield running


@pytest.fixture
async def engine_client(engine: Engine) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(engine.grpc) as channel:
        yield Client(channel)


def constrained(structured_output: pb.StructuredOutput, max_tokens: int = 60) -> pb.GenerateRequest:
    message = request(prompt="Answer: ", max_tokens=max_tokens, n=3, temperature=1.5)
    message.stopping.ignore_eos = False
    message.structured_output.CopyFrom(structured_output)
    return message


@pytest.mark.parametrize(
    ("structured_output", "pattern"),
    [
        (pb.StructuredOutput(regex="[ab]{3}-[0-9]{2}"), r"[ab]{3}-[0-9]{2}"),
        (pb.StructuredOutput(grammar='root ::= "x" [yz] | "(" root ")"'), r"\(*x[yz]\)*"),
        (pb.StructuredOutput(choice=pb.Choice(values=['a "b"', "c\nd"])), r'a "b"|c\nd'),
        (pb.StructuredOutput(structural_tag=NUMBER_CALL), r'<call>\{"a": (1|22)\}</call>'),
    ],
)
async def test_each_kind_of_constraint(
    engine_client: Client, model_dir: Path, structured_output: pb.StructuredOutput, pattern: str
) -> None:
    answer = await engine_client.generate(constrained(structured_output))
    assert answer.code is grpc.StatusCode.OK
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for index in range(3):
        assert answer.finished(index).reason == pb.FINISH_REASON_STOP
        assert re.fullmatch(pattern, tokenizer.decode(answer.tokens(index)))


async def test_what_cant_be_enforced_is_refused_or_dropped_and_named(
    engine_client: Client, model_dir: Path
) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "misspelt": 1})
    refused = await engine_client.generate(constrained(pb.StructuredOutput(json_schema=schema)))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == ["structured_output.json_schema"]
    relaxed = pb.StructuredOutput(json_schema=schema, relax_unenforced=True)
    answer = await engine_client.generate(constrained(relaxed, max_tokens=200))
    assert answer.code is grpc.StatusCode.OK
    assert list(answer.events[0].accepted.relaxed) == ["$.misspelt"]
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for index in range(3):
        if answer.finished(index).reason == pb.FINISH_REASON_STOP:
            assert set(json.loads(tokenizer.decode(answer.tokens(index)))) <= {1, 2}


HOSTILE = [
    pb.StructuredOutput(json_schema='{"items":' * 5000 + "{}" + "}" * 5000),
    pb.StructuredOutput(json_schema='{"$ref": "#"}'),
    pb.StructuredOutput(json_schema=json.dumps({"enum": ["x" * 1000] * 1000})),
    pb.StructuredOutput(json_schema='{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    pb.StructuredOutput(regex="(" * 3000 + "a" + ")" * 3000),
    pb.StructuredOutput(regex="(a{0,1000}){0,1000}b"),
    pb.StructuredOutput(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    pb.StructuredOutput(grammar="root ::= root"),
    pb.StructuredOutput(choice=pb.Choice(values=[f"{i}" * 20 for i in range(2000)])),
    pb.StructuredOutput(structural_tag='{"format":' * 5000 + "1" + "}" * 5000),
]


async def timed(client: Client, message: pb.GenerateRequest) -> tuple[Answer, float]:
    start = time.monotonic()
    answer = await client.generate(message)
    return answer, time.monotonic() - start


async def test_what_is_hostile_is_refused_in_time_and_disturbs_nobody(
    engine_client: Client,
) -> None:
    warm = await engine_client.generate(constrained(pb.StructuredOutput(regex="a")))
    assert warm.code is grpc.StatusCode.OK
    before = await engine_client.core_pid()
    neighbour = asyncio.create_task(engine_client.generate(request(max_tokens=200)))
    for structured_output in HOSTILE:
        waits: list[float] = []
        while not waits or (waits[-1] >= SECONDS and len(waits) < 3):  # the machine may be busy
            answer, seconds = await timed(engine_client, constrained(structured_output))
            waits.append(seconds)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, structured_output
            assert answer.fields[0].startswith("structured_output")
        assert waits[-1] < SECONDS, structured_output
    assert len((await neighbour).tokens()) == 200
    assert await engine_client.core_pid() == before


async def test_a_grammar_may_not_compile_for_ever(engine_client: Client) -> None:
    """It ends at the limit; what waits behind it is served, by the same processes."""
    slow = "root ::= " + " ".join(["x?"] * 1000) + "\nx ::= [a-z]*"
    before = await engine_client.core_pid()
    hostile = asyncio.create_task(
        engine_client.generate(constrained(pb.StructuredOutput(grammar=slow)))
    )
    await asyncio.sleep(0.1)
    behind = await engine_client.generate(constrained(pb.StructuredOutput(regex="[0-9]{4}")))
    assert behind.code is grpc.StatusCode.OK
    answer = await hostile
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.fields == ["structured_output.grammar"]
    assert "too long to compile" in answer.error
    assert await engine_client.core_pid() == before


async def test_what_gets_slow_to_follow_ends_its_own_request(
    engine_client: Client, model_dir: Path
) -> None:
    ambiguous = pb.StructuredOutput(grammar='root ::= (("a"*)*)* "b"')
    message = constrained(ambiguous, max_tokens=1500)
    message.sampling.n = 1
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    message.sampling.allowed_token_ids.extend(tokenizer.encode("a", add_special_tokens=False).ids)
    neighbour = asyncio.create_task(engine_client.generate(request(max_tokens=300)))
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.fields == ["structured_output"]
    assert len((await neighbour).tokens()) == 300
