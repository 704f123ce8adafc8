"""A step is one copy to the device, whatever its requests ask, and one copy back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from engine_service import model_runner
from engine_service.compute_device import Upload
from engine_service.config import CoreConfig
from engine_service.cpu_device import HostUpload
from engine_service.engine_core import EngineCore
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import (
    AddRequest,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.model_runner import ModelRunner
from engine_service.request import Request, RequestKey
from engine_service.scheduler_output import SchedulerOutput, StepUnderWay
from tests.conftest import MakeTinyModel
from tests.pretend_gpu import PretendGpu, PretendUpload
from tests.pretend_sampling import PretendSampling
from tests.unit.test_engine_core import ScriptedGrammars
from tests.unit.test_overlapped_runner import Channel, core_config

VOCAB = 49_152
THIRDS = tuple(range(0, VOCAB, 3))  # too many for the room that steps have beside their integers

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    "told": SamplingParams(temperature=0.7, seed=2, num_logprobs=3),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=1),
    "frequency": SamplingParams(seed=3, frequency_penalty=0.5, presence_penalty=0.4),
    "biased": SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(THIRDS, -30.0)),
    "allowed": SamplingParams(temperature=1.3, seed=4, allowed_token_ids=THIRDS),
    "prompt": SamplingParams(temperature=0.0, num_prompt_logprobs=2),
    "bad words": SamplingParams(seed=5, bad_token_sequences=((7,), (8, 9))),
}


class EveryOther(ScriptedGrammars):
    """Grammars that allow every other token, and are compiled at once."""

    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        self.compiled.append((key, None))
        return True

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        rows = [row for row, r in enumerate(sampling) if r.structured_output is not None]
        words_GW = torch.full((len(rows), VOCAB // 32), 0x55555555, dtype=torch.int32)
        return GrammarBitmask(rows, words_GW) if rows else None


def request(name: str, params: SamplingParams, grammar: StructuredOutput | None) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=[(len(name) * 31 + 17 * place) % VOCAB for place in range(9)],
        sampling=params,
        stopping=StoppingCriteria(max_tokens=6, min_tokens=2, stop_token_ids=(12, 24)),
        structured_output=grammar,
    )


def requests() -> list[AddRequest]:
    made = [request(name, params, None) for name, params in SAMPLINGS.items()]
    return [*made, request("grammar", SAMPLINGS["told"], StructuredOutput("json_object"))]


class Counted:
    """A runner whose launched steps are counted."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.overlaps = runner.overlaps
        self.num_blocks = runner.num_blocks
        self.num_steps = self.num_telling_steps = 0

    def launch(self, plan: SchedulerOutput, mask: GrammarBitmask | None) -> StepUnderWay:
        self.num_steps += 1
        self.num_telling_steps += bool(plan.sampling_requests) or any(
            share.prompt_logprobs_range for share in plan.scheduled
        )
        return self._runner.launch(plan, mask)


def run(runner: Counted, config: CoreConfig, wanted: Sequence[AddRequest]) -> Channel:
    channel = Channel()
    core = EngineCore(config, channel, runner, EveryOther())
    for command in wanted:
        channel.mailbox.put([command])
        core.step()
    while core.step():
        pass
    return channel


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.mark.parametrize("names", [None, ["greedy"], ["drawn"]])
def test_every_step_is_one_copy_there_and_one_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    config = core_config(model_dir)
    wanted = [command for command in requests() if names is None or command.request_id in names]
    in_turn = run(Counted(ModelRunner(config)), config, wanted)

    sampling = PretendSampling()
    monkeypatch.setattr(model_runner, "pick_sampling_ops", lambda kernels: sampling.ops())
    gpu = PretendGpu()
    runner = Counted(ModelRunner(config, gpu))
    num_sent, num_downloads = gpu.num_sent, sampling.num_downloads  # to capture
    got = run(runner, config, wanted)
    assert gpu.num_sent - num_sent == runner.num_steps
    assert sampling.num_downloads - num_downloads == runner.num_telling_steps > 5
    if names is None:
        edits = {"penalties", "biases", "allowed", "banned", "mask", "early_ends"}
        assert sampling.kinds == edits | {"draws", "told", "given"}
        assert gpu.num_larger > 0  # more was sent than there is room for in places that are fixed
    assert got.tokens == in_turn.tokens
    assert got.ends == in_turn.ends
    for name, logprobs in in_turn.logprobs.items():
        assert got.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
        assert got.prompt_logprobs[name] == pytest.approx(in_turn.prompt_logprobs[name], abs=1e-4)


# ---------------------------------------------------------------- the way there


@pytest.fixture(params=["one memory", "two memories"])
def upload(request: pytest.FixtureRequest) -> Upload:
    return HostUpload(100) if request.param == "one memory" else PretendUpload(100)


def send(upload: Upload, num_bytes: int, number: int) -> torch.Tensor:
    upload.begin(num_bytes)[:num_bytes] = number
    return upload.send()


@pytest.mark.parametrize("num_bytes", [1, 100, 101, 5000])
def test_all_that_was_written_is_sent_and_the_first_of_it_to_the_same_place(
    upload: Upload, num_bytes: int
) -> None:
    place = upload.device_bytes.data_ptr()
    for number in (3, 4, 5):
        assert send(upload, num_bytes, number)[:num_bytes].tolist() == [number] * num_bytes
        assert send(upload, 50, 9)[:50].tolist() == [9] * 50
        send(upload, num_bytes, number)
        assert upload.device_bytes.data_ptr() == place
        assert set(upload.device_bytes[: min(num_bytes, 100)].tolist()) == {number}


def test_what_is_being_copied_is_not_written() -> None:
    """A host buffer is written again only after the copy from it was waited for."""
    waited: list[int] = []
    marks = iter(range(100))
    upload = PretendUpload(8, mark=lambda: partial(waited.append, next(marks)))
    num_first = next(marks)
    buffers = []
    for _ in range(4):
        buffers.append(upload.begin(8).ctypes.data)
        upload.send()
    assert buffers[0] == buffers[2] != buffers[1] == buffers[3]
    assert waited[2:] == [num_first + 1, num_first + 2]
