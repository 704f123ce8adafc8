"""The whole core on real grammars: the same ids with jump-forward and without, in fewer steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

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
)
from tests.conftest import MakeTinyModel

EOS = 2


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


SOURCES = [
    StructuredOutput("json_object"),
    schema({"enum": ["customer", "supplier", "custom"]}),
    schema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}),
    schema(
        {
            "type": "object",
            "properties": {
                "n": {"type": "string", "maxLength": 8},
                "ü": {"type": "boolean"},
                "deep": {
                    "type": "object",
                    "properties": {"k": {"enum": [42, None]}},
                    "required": ["k"],
                    "additionalProperties": False,
                },
            },
            "required": ["n", "ü", "deep"],
            "additionalProperties": False,
        }
    ),
    StructuredOutput("regex", "[0-9]{4}-[0-9]{2}"),
    StructuredOutput("grammar", 'root ::= "(" root ")" | "x" "~"{6} "y"'),
    StructuredOutput("choice", json.dumps(["a", "ab", "\x01\x02\x03"])),
]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, seed=5),
    SamplingParams(temperature=1.0, seed=6, frequency_penalty=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=7, logit_bias={EOS: -100.0}),
    SamplingParams(temperature=1.0, seed=8, num_logprobs=1),
]


class Channel:
    """Puts together what each sample says."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.said: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[FinishReason, int | None]] = {}
        self.stats = CoreStats()

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        self.stats = frame.stats
        for output in frame.outputs:
            key = (output.request_id, output.index)
            self.said.setdefault(key, []).extend(output.new_token_ids)
            if output.finish is not None:
                assert output.finish.failure is None
                self.ends[key] = (output.finish.reason, output.finish.stop_token_id)


def requests() -> list[AddRequest]:
    return [
        AddRequest(
            request_id=f"r{i}-{j}",
            prompt_token_ids=[100 + (17 * i + 5 * k) % 900 for k in range(5 + 3 * j)],
            sampling=params,
            stopping=StoppingCriteria(60, min_tokens=3 * (j == 1), eos_token_ids=(EOS,)),
            structured_output=source,
            n=2,
        )
        for i, source in enumerate(SOURCES)
        for j, params in enumerate(PARAMS)
    ]


def run(model_dir: Path, num_blocks: int, *, enable_jump_forward: bool) -> Channel:
    config = CoreConfig(
        model=ModelConfig(str(model_dir), "tiny"),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=24, enable_jump_forward=enable_jump_forward),
        check_integrity=True,
    )
    channel = Channel()
    core, _ = build_core(config, channel)
    asked = requests()
    channel.mailbox.put(asked)
    while len(channel.ends) < sum(request.n for request in asked):
        if not core.step():
            time.sleep(0.005)  # all that is left waits for its grammar
    core.close()
    return channel


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_blocks", [2000, 32])
def test_ids_do_not_tell_whether_steps_were_saved(
    tiny_model_dir: MakeTinyModel, num_blocks: int
) -> None:
    model_dir = tiny_model_dir("llama", num_hidden_layers=1)
    with_it = run(model_dir, num_blocks, enable_jump_forward=True)
    without = run(model_dir, num_blocks, enable_jump_forward=False)
    assert with_it.said == without.said
    assert with_it.ends == without.ends
    assert with_it.stats.num_forced_tokens > 100
    assert without.stats.num_forced_tokens == 0
    assert with_it.stats.num_generated_tokens == without.stats.num_generated_tokens
    assert (with_it.stats.num_preemptions > 0) == (num_blocks == 32)
    assert with_it.stats.used_blocks == 0
