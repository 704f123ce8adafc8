"""A model whose output is not a number for one token: who meets that token fails, nobody else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.core_process import build_core
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AddRequest,
    FinishReason,
    Frame,
    RequestOutput,
    SamplingParams,
    StepFrame,
    StoppingCriteria,
)
from tests.conftest import MakeTinyModel

BAD_TOKEN = 500


class Channel:
    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.outputs: list[RequestOutput] = []
        self.used_blocks = 0

    def send(self, frame: Frame) -> None:
        assert isinstance(frame, StepFrame)
        self.outputs += frame.outputs
        self.used_blocks = frame.stats.used_blocks


@pytest.fixture(scope="module")
def broken_dir(tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embedding of BAD_TOKEN is NaN; the head is sound."""
    sound = tiny_model_dir("llama", tie_word_embeddings=False)
    directory = shutil.copytree(sound, tmp_path_factory.mktemp("broken") / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("num_prompt_logprobs", [None, 1])
def test_the_request_fails_and_its_neighbours_finish(
    broken_dir: Path, num_prompt_logprobs: int | None
) -> None:
    config = CoreConfig(
        model=ModelConfig(str(broken_dir), "broken"),
        cache=CacheConfig(num_blocks=16),
        check_integrity=True,
    )
    channel = Channel()
    core, _ = build_core(config, channel)
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=num_prompt_logprobs)
    stopping = StoppingCriteria(max_tokens=4)
    prompts = {"one": [1, 2, 3], "bad": [1, BAD_TOKEN, 3], "two": [7, 8]}
    channel.mailbox.put(
        [AddRequest(name, ids, sampling, stopping) for name, ids in prompts.items()]
    )
    while core.step():
        pass

    finishes = {o.request_id: o.finish for o in channel.outputs if o.finish is not None}
    failure = finishes["bad"].failure
    assert failure is not None
    assert failure.reason == "INTERNAL_ERROR"
    assert "finite" in failure.message
    for name in ("one", "two"):
        assert finishes[name].reason is FinishReason.LENGTH
        tokens = [i for o in channel.outputs if o.request_id == name for i in o.new_token_ids]
        assert len(tokens) == 4
    assert channel.used_blocks == 0


def test_a_penalty_that_overflows_fails_its_own_request_only(broken_dir: Path) -> None:
    config = CoreConfig(
        model=ModelConfig(str(broken_dir), "broken"),
        cache=CacheConfig(num_blocks=16),
        check_integrity=True,
    )
    channel = Channel()
    core, _ = build_core(config, channel)
    overflows = SamplingParams(repetition_penalty=1e-40, num_logprobs=0)
    stopping = StoppingCriteria(max_tokens=4)
    commands = [AddRequest(f"bad{i}", [1, 2, 3], overflows, stopping) for i in range(9)]
    sound = SamplingParams(temperature=1.0, repetition_penalty=1.5, num_logprobs=0)
    channel.mailbox.put([*commands, AddRequest("good", [1, 2, 3], sound, stopping)])
    while core.step():
        pass

    finishes = {o.request_id: o.finish for o in channel.outputs if o.finish is not None}
    assert finishes.pop("good").reason is FinishReason.LENGTH
    assert len(finishes) == 9
    for finish in finishes.values():
        assert finish.failure is not None
        assert finish.failure.reason == "INVALID_VALUE"
        assert finish.failure.field == "sampling.repetition_penalty"
