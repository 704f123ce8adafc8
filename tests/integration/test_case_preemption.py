"""CASE K5: preemption is invisible in the output.

`--batch-invariant`, so that the text under a pool far too small equals, to the letter, the text of
the same requests one by one under a large one.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeTinyModel
from tests.serving import Served, Stream, engine, load, serve, stream, wait_idle

SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "colours",
        "schema": {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green", "blue"]},
                "shades": {
                    "type": "array",
                    "items": {"enum": ["light", "dark", "pale"]},
                    "minItems": 12,
                    "maxItems": 12,
                },
            },
            "required": ["colour", "shades"],
            "additionalProperties": False,
        },
    },
}
GREEDY: dict[str, Any] = {"temperature": 0}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.9, "seed": 1},
    {**GREEDY, "response_format": SCHEMA},
    GREEDY,
    {**GREEDY, "frequency_penalty": 0.7},
    {"temperature": 0.9, "seed": 2, "top_p": 0.95},
    {**GREEDY, "response_format": SCHEMA},
    GREEDY,
]


async def answer(served: Served, number: int) -> Stream:
    body = {
        "model": served.model,
        "prompt": [1_000 * (number + 1) + i for i in range(64)],
        "max_tokens": 200,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
        **KINDS[number],
    }
    if "response_format" not in body:
        body["ignore_eos"] = True
    return await stream(served.http, "/v1/completions", body)


def check(number: int, got: Stream, want: Stream) -> None:
    assert got.status == want.status == 200
    assert got.text() == want.text()
    assert got.finish_reasons() == want.finish_reasons()
    assert got.num_done == 1
    usage = got.usage()
    reference = want.usage()
    assert usage is not None and reference is not None
    assert usage["prompt_tokens"] == 64
    assert usage["completion_tokens"] == reference["completion_tokens"]
    assert logprobs_of(got) == logprobs_of(want)
    assert len(logprobs_of(got)) == usage["completion_tokens"]
    if "response_format" in KINDS[number]:
        assert len(json.loads(got.text())["shades"]) == 12


def logprobs_of(answer: Stream) -> list[float]:
    pieces = [choice["logprobs"] for choice in answer.choice_chunks() if choice.get("logprobs")]
    return [value for piece in pieces for value in piece["token_logprobs"]]


async def run(model_dir: Path, work_dir: Path, *flags: str) -> None:
    flags += ("--batch-invariant",)
    with serve(model_dir, work_dir, *flags) as large:
        expected = [await answer(large, number) for number in range(len(KINDS))]
        assert (await load(large)).num_preemptions == 0
        async with engine(large) as client:
            assert (await client.get_server_info()).batch_invariant
    with serve(model_dir, work_dir, *flags, "--num-gpu-blocks-override", "64") as small:
        answers = await asyncio.gather(*(answer(small, number) for number in range(len(KINDS))))
        report = await wait_idle(small, 5)
    assert report.num_preemptions > 0
    for number, (got, want) in enumerate(zip(answers, expected, strict=True)):
        check(number, got, want)


async def test_k5_preemption_is_invisible(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", num_hidden_layers=2)
    await run(model_dir, tmp_path, "--num-threads", "1")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_k5_on_the_embedded_model(embedded_model_dir: Path, tmp_path: Path) -> None:
    await run(embedded_model_dir, tmp_path)
