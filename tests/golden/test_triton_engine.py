"""The whole core on Triton's kernels, with overlapped and replayed steps: the same tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine_service.compute_device import ComputeDevice
from engine_service.cuda_device import CudaDevice
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest, SchedulerOutput
from tests.conftest import MakeTinyModel
from tests.pretend_gpu import PretendGpu
from tests.unit import test_one_upload
from tests.unit.test_one_upload import Counted
from tests.unit.test_overlapped_runner import core_config, run

pytestmark = pytest.mark.slow  # in Triton's interpreter, where there is no GPU

NUMBERS = [0, 1, 2, 3, 4]


def gpu() -> ComputeDevice:
    return CudaDevice() if CudaDevice.is_available() else PretendGpu()


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tokens_are_those_of_the_reference(model_dir: Path, batch_invariant: bool) -> None:
    config = core_config(model_dir)
    expected = run(ModelRunner(config), config, NUMBERS)
    model = msgspec.structs.replace(
        config.model, kernels="triton", dtype="float32", batch_invariant=batch_invariant
    )
    config = msgspec.structs.replace(config, model=model)
    runner = ModelRunner(config, gpu())
    computed_by_triton = {"paged_attention", "rotary_cache_write", "add_rms_norm", "sample_rows"}
    assert {runner.op_backends[op] for op in computed_by_triton} == {"triton"}
    with np.errstate(over="ignore"):  # the random numbers of the interpreter
        got = run(runner, config, NUMBERS)
    assert got.tokens == expected.tokens
    assert got.ends == expected.ends


@pytest.mark.skipif(CudaDevice.is_available(), reason="copies are counted on a pretended GPU")
def test_every_step_is_one_copy_there_and_one_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grammar's mask, penalties and logprobs of prompts and outputs."""
    from kernels.triton.sampling_results import ResultsBuffer

    copy_to_host, num_downloads = ResultsBuffer.copy_to_host, 0

    def counted(buffer: ResultsBuffer) -> object:
        nonlocal num_downloads
        num_downloads += 1
        return copy_to_host(buffer)

    monkeypatch.setattr(ResultsBuffer, "copy_to_host", counted)
    stopping = StoppingCriteria(max_tokens=2)
    names = ("told", "penalties", "prompt", "grammar")
    wanted = [
        msgspec.structs.replace(command, prompt_token_ids=[3, 141, 59], stopping=stopping)
        for command in test_one_upload.requests()
        if command.request_id in names
    ]
    config, device = core_config(model_dir), PretendGpu()
    in_turn = test_one_upload.run(Counted(ModelRunner(config)), config, wanted)
    model = msgspec.structs.replace(config.model, kernels="triton", dtype="float32")
    config = msgspec.structs.replace(config, model=model)
    with np.errstate(all="ignore"):
        runner = Counted(ModelRunner(config, device))
        num_sent, num_downloads = device.num_sent, 0
        got = test_one_upload.run(runner, config, wanted)
    assert device.num_sent - num_sent == runner.num_steps
    assert num_downloads == runner.num_telling_steps
    assert got.tokens == in_turn.tokens
    for name in names:
        assert got.logprobs[name] == pytest.approx(in_turn.logprobs[name], abs=1e-3)
        assert got.prompt_logprobs[name] == pytest.approx(in_turn.prompt_logprobs[name], abs=1e-3)


def prompt_logprobs(runner: ModelRunner) -> list[float]:
    """Of a fixed prompt, computed in one step; of an untrained model, numbers around -15."""
    tokens = [(7 * place + 3) % 200 for place in range(11)]
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    request = Request("r", 0, tokens, params, StoppingCriteria(max_tokens=1))
    share = ScheduledRequest.of(request, 0, len(tokens), [4, 2, 0])
    with np.errstate(all="ignore"):
        output = runner.execute_model(SchedulerOutput(1, [share], len(tokens)), None)
    assert output.failures == {}
    return [entry.logprob for entry in output.prompt_logprobs[request.key]]


@pytest.mark.parametrize(
    ("quantization", "dtype", "tolerance"),
    [
        ("none", "float16", 0.05),
        ("none", "bfloat16", 0.3),
        ("int8", "bfloat16", 1.0),
        ("int4", "bfloat16", 4.0),
        ("fp8", "bfloat16", 2.0),
    ],
)
def test_every_form_of_weights_says_nearly_the_same(
    model_dir: Path, quantization: str, dtype: str, tolerance: float
) -> None:
    config = core_config(model_dir)
    exact = prompt_logprobs(ModelRunner(config))
    model = msgspec.structs.replace(
        config.model, kernels="triton", dtype=dtype, quantization=quantization
    )
    runner = ModelRunner(msgspec.structs.replace(config, model=model), gpu())
    assert (runner.quantization, runner.dtype_name) == (quantization, dtype)
    assert prompt_logprobs(runner) == pytest.approx(exact, abs=tolerance)
