"""The model runner on a device that computes beside the host and replays steps: the tokens are the
same as in turn, on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.decode_graphs import DecodeGraphs, graph_sizes, graph_widths
from engine_service.engine_core import EngineCore
from engine_service.input_batch import InputBatch
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AddRequest,
    FinishReason,
    Frame,
    SamplingParams,
    StepFrame,
    StoppingCriteria,
)
from engine_service.model_runner import ModelRunner
from tests.conftest import MakeTinyModel
from tests.pretend_gpu import PretendGpu
from tests.unit.test_engine_core import ScriptedGrammars

NUM_REQUESTS = 9
BLOCK_SIZE = 4


class Channel:
    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        for output in frame.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            told = [entry.logprob for entry in output.new_logprobs]
            self.logprobs.setdefault(output.request_id, []).extend(told)
            told = [entry.logprob for entry in output.new_prompt_logprobs]
            self.prompt_logprobs.setdefault(output.request_id, []).extend(told)
            if output.finish is not None:
                self.ends[output.request_id] = output.finish.reason


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


def core_config(model_dir: Path, num_blocks: int | None = 64) -> CoreConfig:
    return CoreConfig(
        model=ModelConfig(str(model_dir), "tiny", kernels="reference"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=12),
        check_integrity=True,
    )


def request(number: int) -> AddRequest:
    """Of all kinds: greedy, drawn, told of, with penalties, with an early end."""
    rng = random.Random(number)
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=number),
        SamplingParams(temperature=0.8, top_p=0.9, seed=number, num_logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.5, top_k=30, seed=number),
    )[number % 5]
    return AddRequest(
        request_id=f"r{number}",
        prompt_token_ids=[rng.randrange(200) for _ in range(rng.choice((1, 3, 9, 25)))],
        sampling=params,
        stopping=StoppingCriteria(
            max_tokens=rng.choice((1, 2, 12, 20)), eos_token_ids=tuple(range(0, 200, 17))
        ),
    )


def run(runner: ModelRunner, config: CoreConfig, numbers: list[int]) -> Channel:
    """Requests come in while others run."""
    channel = Channel()
    core = EngineCore(config, channel, runner, ScriptedGrammars())
    for number in numbers:
        channel.mailbox.put([request(number)])
        core.step()
    while core.step():
        pass
    assert len(channel.ends) == len(numbers)
    return channel


@pytest.mark.parametrize("num_blocks", [64, 12])  # room for all; preemption
def test_tokens_are_those_of_a_device_that_computes_in_turn(
    model_dir: Path, num_blocks: int
) -> None:
    config = core_config(model_dir, num_blocks)
    gpu = PretendGpu()
    expected = run(ModelRunner(config), config, [*range(NUM_REQUESTS)])
    got = run(ModelRunner(config, gpu), config, [*range(NUM_REQUESTS)])
    assert got.tokens == expected.tokens
    assert got.ends == expected.ends
    for name, logprobs in expected.logprobs.items():
        assert got.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    assert gpu.num_captured > 0
    assert gpu.num_replayed > gpu.num_captured


def test_the_pool_is_what_the_largest_step_leaves(model_dir: Path) -> None:
    config = core_config(model_dir, num_blocks=None)
    runner = ModelRunner(config, PretendGpu())
    bytes_per_block = 3 * 2 * BLOCK_SIZE * 2 * 16 * 4
    assert runner.num_blocks == (1 << 20) // bytes_per_block


@pytest.mark.parametrize("max_model_len", [5, 10_000])  # less than a step has; more than there are
def test_no_prompt_of_the_largest_step_is_longer_than_the_context(
    model_dir: Path, max_model_len: int
) -> None:
    config = msgspec.structs.replace(
        core_config(model_dir, num_blocks=None),
        model=ModelConfig(str(model_dir), "tiny", kernels="reference", max_model_len=max_model_len),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=2100),
    )
    runner = ModelRunner(config, PretendGpu())
    assert runner.max_model_len == min(max_model_len, runner.num_blocks * BLOCK_SIZE)


def test_unused_memory_is_released_when_a_step_finds_too_little(model_dir: Path) -> None:
    config, gpu = core_config(model_dir), PretendGpu()
    runner = ModelRunner(config, gpu)
    forward = runner._decoder.forward
    failures = iter([True])

    def short_of_memory(*arguments: object) -> object:
        if next(failures, False):
            raise torch.OutOfMemoryError("no room")
        return forward(*arguments)  # type: ignore[arg-type]

    runner._decoder.forward = short_of_memory  # type: ignore[method-assign, assignment]
    got = run(runner, config, [0, 1, 2])
    assert gpu.num_releases == 1
    assert FinishReason.ERROR not in got.ends.values()
    in_turn = run(ModelRunner(config), config, [0, 1, 2])
    assert got.tokens == in_turn.tokens


def test_the_step_that_needs_the_most_memory_is_captured_first(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[tuple[int, ...]] = []
    compute = DecodeGraphs._compute

    def noted(graphs: DecodeGraphs, batch: InputBatch) -> torch.Tensor:
        captured.append(tuple(batch.block_table_RM.shape))
        return compute(graphs, batch)

    monkeypatch.setattr(DecodeGraphs, "_compute", noted)
    ModelRunner(core_config(model_dir, num_blocks=300), PretendGpu())
    shapes = [*dict.fromkeys(captured)]
    assert shapes == [(6, 300), (6, 64), (4, 64), (2, 64), (1, 64)]


def test_graphs_are_few_and_fit_every_step() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_widths(3) == [3]
    assert graph_widths(8192) == [64, 256, 1024, 4096, 8192]
