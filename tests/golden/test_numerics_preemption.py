"""A hundred mixed requests under a pool far too small say what they say under a large one.

The whole core runs in this process: mailbox, grammars, scheduler, model, frames; integrity is
proved whenever it falls idle.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.core_process import build_core
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
    TokenLogprobs,
)
from tests.conftest import MakeTinyModel

NUM_REQUESTS = 100
SCHEMA = StructuredOutput(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {
                "size": {"enum": ["small", "large"]},
                "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2},
            },
            "required": ["size", "colours"],
            "additionalProperties": False,
        }
    ),
)
GREEDY = SamplingParams(temperature=0.0, num_logprobs=1)


class Channel:
    """Keeps the frames."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.frames: list[StepFrame] = []

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        self.frames.append(frame)


def mixed_requests() -> list[AddRequest]:
    """Greedy, seeded, with penalties, bound to a schema, in turns; short prompts that grow
    to several blocks, which is what makes the pool too small once they run."""
    generator = torch.Generator().manual_seed(3)
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.95, seed=5, num_logprobs=0),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=6),
    )
    requests = []
    for i in range(NUM_REQUESTS):
        length = 5 + 37 * i % 29
        prompt = torch.randint(20, 49_000, (length,), generator=generator).tolist()
        kind = i % len(kinds)
        requests.append(
            AddRequest(
                request_id=f"r{i}",
                prompt_token_ids=prompt,
                sampling=kinds[kind],
                stopping=StoppingCriteria(max_tokens=50 + i % 9, eos_token_ids=(2,)),
                structured_output=SCHEMA if kind == 3 else None,
                arrival_ns=i,
            )
        )
    return requests


def run(
    model_dir: Path, num_blocks: int, requests: list[AddRequest]
) -> tuple[dict[str, tuple[list[int], list[TokenLogprobs]]], CoreStats]:
    config = CoreConfig(
        model=ModelConfig(str(model_dir), "tiny", kernels="reference", batch_invariant=True),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=32),
        check_integrity=True,
    )
    channel = Channel()
    core, _ = build_core(config, channel)
    channel.mailbox.put(requests)
    said: dict[str, tuple[list[int], list[TokenLogprobs]]] = {
        request.request_id: ([], []) for request in requests
    }
    finished: set[str] = set()
    while len(finished) < len(requests):
        if not core.step():
            time.sleep(0.005)  # all that is left waits for its grammar
        for frame in channel.frames:
            for output in frame.outputs:
                assert output.request_id not in finished
                said[output.request_id][0].extend(output.new_token_ids)
                said[output.request_id][1].extend(output.new_logprobs)
                if output.finish is not None:
                    assert output.finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
                    finished.add(output.request_id)
        if len(finished) < len(requests):
            channel.frames.clear()
    stats = channel.frames[-1].stats
    assert stats.used_blocks == stats.num_running == stats.num_waiting == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == num_blocks
    return said, stats


@pytest.mark.timeout(240)
def test_a_hundred_mixed_requests_in_64_blocks(tiny_model_dir: MakeTinyModel) -> None:
    model_dir = tiny_model_dir("llama", num_hidden_layers=1)
    requests = mixed_requests()
    expected, undisturbed = run(model_dir, 2_000, requests)
    said, stats = run(model_dir, 64, requests)
    assert undisturbed.num_preemptions == 0
    assert stats.num_preemptions > 0
    assert said == expected
    assert all(token_ids for token_ids, _ in said.values())
