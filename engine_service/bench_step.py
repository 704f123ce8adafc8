"""python -m engine_service.bench_step: what a step costs beside its forward, as JSON.

    core         drain, schedule, update, emit: `EngineCore.step` without what is below
    input_batch  the ragged batch from the scheduled requests
    sampler      from logits to tokens; all rows are greedy, or drawn by top-p
    encode       the step's frame as bytes (in a process of its own: by the writer thread)

The core, scheduler, KV cache, batch and sampler are the real ones, on one thread; in place of the
model stand fixed logits. All requests decode, none comes or ends. Microseconds of CPU time a step:
the median of some steps, so that what else the machine does hardly counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.cpu_device import CpuDevice
from engine_service.engine_core import EngineCore
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.input_batch import InputBuffers
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AddRequest,
    Failure,
    Frame,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.request import Request, RequestKey
from engine_service.sampler import plan_sampling
from engine_service.scheduler_output import (
    ModelRunnerOutput,
    SchedulerOutput,
    StepDone,
    StepUnderWay,
)
from engine_service.transport import encode_frame
from kernels.cpu.library import set_num_threads
from kernels.sampling_ops import cpu_sampling_ops

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 500

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
}


class _Parts:
    """Nanoseconds of CPU time of the step that is being made."""

    def __init__(self) -> None:
        self.input_batch = self.forward = self.sampler = self.encode = 0


class _FixedLogits:
    """A model runner without a model."""

    overlaps = False

    def __init__(self, parts: _Parts, num_requests: int, num_steps: int) -> None:
        self.num_blocks = num_requests * (2 + (NUM_PROMPT_TOKENS + num_steps) // BLOCK_SIZE)
        self._inputs = InputBuffers(
            CpuDevice(),
            max_tokens=num_requests * NUM_PROMPT_TOKENS,
            max_requests=num_requests,
            max_blocks=self.num_blocks // num_requests,
            block_size=BLOCK_SIZE,
            spare_block=self.num_blocks,
        )
        self._parts = parts
        generator = torch.Generator().manual_seed(0)
        fixed_RV = torch.randn(num_requests, VOCAB_SIZE, generator=generator) * 4.0
        self._logits_RV = torch.empty_like(fixed_RV)
        self._fixed_RV = fixed_RV.numpy()
        self._ops = cpu_sampling_ops()

    @torch.inference_mode()
    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        parts, requests = self._parts, scheduler_output.sampling_requests
        start_ns = time.thread_time_ns()
        self._inputs.build(scheduler_output.scheduled)
        built_ns = time.thread_time_ns()
        logits_RV = self._logits_RV[: len(requests)]
        np.copyto(logits_RV.numpy(), self._fixed_RV[: len(requests)])  # on this thread alone
        forwarded_ns = time.thread_time_ns()
        sampling = plan_sampling(requests, token_bitmask, VOCAB_SIZE, self._ops).launch(logits_RV)
        tokens = zip(requests, sampling.wait().tokens, strict=True)
        output = ModelRunnerOutput({request.key: token.token_id for request, token in tokens})
        parts.input_batch = built_ns - start_ns
        parts.forward = forwarded_ns - built_ns
        parts.sampler = time.thread_time_ns() - forwarded_ns
        return StepDone(output)


class _EncodingChannel:
    def __init__(self, parts: _Parts) -> None:
        self.mailbox = Mailbox()
        self._parts = parts

    def send(self, frame: Frame) -> None:
        start_ns = time.thread_time_ns()
        encode_frame(frame)
        self._parts.encode = time.thread_time_ns() - start_ns


class _NoGrammars:
    def submit(self, key: RequestKey, spec: StructuredOutput) -> bool:
        raise AssertionError("no request here has a grammar")

    def accept(self, key: RequestKey, token_id: int) -> None:
        raise AssertionError("no request here has a grammar")

    def take_forced_token(self, key: RequestKey) -> int | None:
        raise AssertionError("no request here has a grammar")

    def is_terminated(self, key: RequestKey) -> bool:
        raise AssertionError("no request here has a grammar")

    def release(self, key: RequestKey) -> None:
        raise AssertionError("no request here has a grammar")

    def poll(self) -> list[tuple[RequestKey, Failure | None]]:
        return []

    def take_compile_times_ns(self) -> list[int]:
        return []

    def fill_bitmask(self, sampling: Sequence[Request]) -> GrammarBitmask | None:
        return None

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure(num_requests: int = 32, num_steps: int = 200) -> dict[str, float]:
    """Microseconds a step, by "<kind>_<part>_us"."""
    set_num_threads(1)
    figures = {}
    for kind, params in KINDS.items():
        for part, microseconds in _parts_of_steps(params, num_requests, num_steps).items():
            figures[f"{kind}_{part}_us"] = microseconds
    return figures


def _parts_of_steps(params: SamplingParams, num_requests: int, num_steps: int) -> dict[str, float]:
    parts = _Parts()
    channel = _EncodingChannel(parts)
    config = CoreConfig(
        model=ModelConfig("nowhere", "fixed logits"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=4096),
    )
    core = EngineCore(config, channel, _FixedLogits(parts, num_requests, num_steps), _NoGrammars())
    stopping = StoppingCriteria(max_tokens=2 * num_steps + 100, eos_token_ids=(2,), min_tokens=0)
    channel.mailbox.put(
        AddRequest(f"chatcmpl-{i:032x}", _prompt(i), params, stopping) for i in range(num_requests)
    )
    num_prefill_steps = -(-num_requests * NUM_PROMPT_TOKENS // 4096) + 5
    for _ in range(num_prefill_steps):
        core.step()
    seen: dict[str, list[int]] = {
        name: [] for name in ("core", "input_batch", "sampler", "encode", "all")
    }
    for _ in range(num_steps - num_prefill_steps):
        start_ns = time.thread_time_ns()
        core.step()
        total = time.thread_time_ns() - start_ns - parts.forward
        seen["core"].append(total - parts.input_batch - parts.sampler - parts.encode)
        seen["input_batch"].append(parts.input_batch)
        seen["sampler"].append(parts.sampler)
        seen["encode"].append(parts.encode)
        seen["all"].append(total)
    return {name: median(values) / 1000 for name, values in seen.items()}


def _prompt(number: int) -> list[int]:
    return [(1000 * number + 7 * i) % VOCAB_SIZE for i in range(NUM_PROMPT_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_step", description=__doc__)
    parser.add_argument("--num-requests", type=int, default=32, help="that run at once")
    arguments = parser.parse_args()
    figures = measure(arguments.num_requests)
    print(json.dumps({name: round(us, 1) for name, us in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
