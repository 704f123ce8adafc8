"""The engine core with random weights on a GPU, for `bench_gpu`: tokens a second and where they go.

Everything from added requests to frames is the real core's; only gRPC and grammars are left out.
All requests of a run come at once and have prompts and outputs of one length. A run is made twice:
the first compiles kernels and captures graphs, the second counts.

    prompts | prefill steps | mixed steps | steps of one token each: decode figures | last steps |
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple

import torch

from engine_service.bench_gpu_errors import within
from engine_service.bench_gpu_items import CheckFailed, Figures, Item
from engine_service.bench_gpu_shapes import ModelShape
from engine_service.compute_device import ComputeDevice, sized_for
from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.engine_core import EngineCore
from engine_service.grammar_bitmask import GrammarBitmask
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
from engine_service.request import Request
from engine_service.scheduler_output import (
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepUnderWay,
)
from engine_service.structured_output import StructuredOutputManager

_LOGPROB_BOUND: Final = 0.02  # between two ways to compute the same in float32


class Load(NamedTuple):
    num_requests: int
    num_prompt_tokens: int  # of each
    num_output_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_prompt_tokens} in, "
            f"{self.num_output_tokens} out"
        )


class Variant(NamedTuple):
    """Of a device: what it is told to leave."""

    overlaps: bool = True
    replays_graphs: bool = True

    def __str__(self) -> str:
        left_out = [
            name
            for name, is_on in (("overlap", self.overlaps), ("graphs", self.replays_graphs))
            if not is_on
        ]
        return f"without {' and '.join(left_out)}" if left_out else ""


WHOLE: Final = Variant()
ABLATIONS: Final = (Variant(replays_graphs=False), Variant(overlaps=False), Variant(False, False))


@dataclass(frozen=True, slots=True)
class Sizes:
    prefill: Load
    decodes: tuple[Load, ...]
    ablated: tuple[Load, ...]
    check_tokens: int  # of a prompt whose logprobs are compared
    num_blocks: int | None  # of the KV cache; None: all that the device has

    @classmethod
    def of_gpu(cls, with_ablations: bool) -> Sizes:
        decodes = tuple(Load(number, 128, 128) for number in (1, 32, 256))
        return cls(Load(16, 2048, 1), decodes, decodes[:2] if with_ablations else (), 300, None)


@dataclass(slots=True)
class _Run:
    seconds: float = 0.0
    stamps_ns: list[tuple[int, int]] = field(default_factory=list)  # of a frame; tokens of its step
    host_ns: list[int] = field(default_factory=list)  # of a step, but for waiting
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def decode_gaps_ns(self, num_requests: int) -> list[int]:
        """Between the frames of two steps in a row that have one token of each request."""
        ends = [end for end, num_tokens in self.stamps_ns if num_tokens == num_requests]
        return [second - first for first, second in pairwise(ends)]


class _Channel:
    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.run = _Run()
        self.num_finished = 0

    def send(self, frame: Frame) -> None:
        if not isinstance(frame, StepFrame):
            return
        self.run.stamps_ns.append((time.monotonic_ns(), frame.num_scheduled_tokens))
        for output in frame.outputs:
            self.run.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish is not None:
                self.num_finished += 1
                if output.finish.reason is not FinishReason.LENGTH:
                    raise CheckFailed(f"a request ended with {output.finish}")


class _TimedRunner:
    """A runner, and how long the core waited for it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks
        self.overlaps = runner.overlaps
        self.waited_ns = 0

    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        return _TimedStep(self._runner.launch(scheduler_output, token_bitmask), self)


class _TimedStep(NamedTuple):
    step: StepUnderWay
    runner: _TimedRunner

    def wait(self) -> ModelRunnerOutput:
        start_ns = time.monotonic_ns()
        output = self.step.wait()
        self.runner.waited_ns += time.monotonic_ns() - start_ns
        return output


class EngineBench:
    """Of one shape. Holds one engine at a time."""

    def __init__(
        self,
        shape: ModelShape,
        sizes: Sizes,
        model_dir: Path,
        new_device: Callable[[], ComputeDevice],
    ) -> None:
        shape.write_config(model_dir)
        self._shape = shape
        self._sizes = sizes
        self._model_dir = model_dir
        self._new_device = new_device
        self._loaded: tuple[Variant, CoreConfig, ModelRunner] | None = None
        self._num_runs = 0

    def items(self) -> list[Item]:
        sizes = self._sizes
        named = [
            Item("as the reference", self._compare),
            Item("start", self._start),
            Item(f"prefill of {sizes.prefill}", self._prefill),
        ]
        named += [Item(str(load), partial(self._decode, WHOLE, load)) for load in sizes.decodes]
        return named + [
            Item(f"{load}, {variant}", partial(self._decode, variant, load))
            for variant in ABLATIONS
            for load in sizes.ablated
        ]

    def _compare(self) -> Figures:
        """The logprobs of a prompt's tokens in float32, from Triton's kernels and the reference."""
        triton, reference = (self._prompt_logprobs(name) for name in ("triton", "reference"))
        pairs = zip(triton, reference, strict=True)
        return within(_LOGPROB_BOUND, [abs(one - other) for one, other in pairs])

    def _prompt_logprobs(self, kernels: str) -> list[float]:
        num_tokens = self._sizes.check_tokens
        self._unload()
        cache = CacheConfig(num_blocks=-(-num_tokens // CacheConfig().block_size))
        device = self._new_device()
        device.replayed_kernels = ()  # for one step none is worth its capture
        config = self._config(device, cache, kernels=kernels, dtype="float32")
        runner = ModelRunner(config, device)
        prompt = _prompt(0, num_tokens, self._shape.vocab_size)
        params = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
        request = Request("r", 0, prompt, params, StoppingCriteria(max_tokens=1))
        share = ScheduledRequest.of(request, 0, num_tokens, range(runner.num_blocks))
        output = runner.execute_model(SchedulerOutput(1, [share], num_tokens), None)
        if output.failures:
            raise CheckFailed(f"the {kernels} kernels: {output.failures}")
        return [entry.logprob for entry in output.prompt_logprobs[request.key]]

    def _start(self) -> Figures:
        self._unload()
        start = time.perf_counter()
        _, runner = self._engine(WHOLE)
        return {
            "seconds": time.perf_counter() - start,
            "blocks": float(runner.num_blocks),
            "cached_tokens": float(runner.num_blocks * CacheConfig().block_size),
        }

    def _prefill(self) -> Figures:
        shape, load = self._shape, self._sizes.prefill
        run = self._second_run(WHOLE, load)
        num_tokens = load.num_requests * load.num_prompt_tokens
        linear = shape.linear_operations(num_tokens, load.num_requests)
        attention = load.num_requests * shape.attention_operations(load.num_prompt_tokens)
        return {
            "tokens_s": num_tokens / run.seconds,
            "tflop_s": (linear + attention) / run.seconds * 1e-12,
            "share_of_attention": attention / (linear + attention),
        }

    def _decode(self, variant: Variant, load: Load) -> Figures:
        run = self._second_run(variant, load)
        gaps_ns = run.decode_gaps_ns(load.num_requests)
        if not gaps_ns:
            raise CheckFailed(f"the KV cache has no room for {load.num_requests} requests at once")
        step_seconds = sum(gaps_ns) / len(gaps_ns) * 1e-9
        # Of the step in the middle of the run.
        context = load.num_requests * (load.num_prompt_tokens + load.num_output_tokens // 2)
        itemsize = getattr(torch, self._shape.dtype).itemsize
        num_bytes = self._shape.decode_bytes(context, itemsize, itemsize)
        return {
            "output_tokens_s": load.num_requests * load.num_output_tokens / run.seconds,
            "decode_tokens_s": load.num_requests / step_seconds,
            "itl_p50_ms": median(gaps_ns) * 1e-6,
            "itl_p99_ms": quantiles(gaps_ns, n=100, method="inclusive")[98] * 1e-6,
            "gb_s": num_bytes / step_seconds * 1e-9,
            "host_us": median(run.host_ns) * 1e-3,
        }

    # ------------------------------------------------------------ runs

    def _second_run(self, variant: Variant, load: Load) -> _Run:
        config, runner = self._engine(variant)
        self._run(config, runner, load)
        return self._run(config, runner, load)

    def _run(self, config: CoreConfig, runner: ModelRunner, load: Load) -> _Run:
        self._num_runs += 1
        channel, timed = _Channel(), _TimedRunner(runner)
        grammars = StructuredOutputManager(
            config.model.model_dir,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            on_ready=channel.mailbox.wake,
            config=config.grammar,
        )
        core = EngineCore(config, channel, timed, grammars)
        stopping = StoppingCriteria(max_tokens=load.num_output_tokens)
        channel.mailbox.put(
            AddRequest(
                f"r{number}",
                _prompt(
                    1000 * self._num_runs + number, load.num_prompt_tokens, self._shape.vocab_size
                ),
                SamplingParams(temperature=0.0),
                stopping,
            )
            for number in range(load.num_requests)
        )
        start_ns = time.monotonic_ns()
        while channel.num_finished < load.num_requests:
            step_ns, waited_ns = time.monotonic_ns(), timed.waited_ns
            core.step()
            step_ns = time.monotonic_ns() - step_ns
            channel.run.host_ns.append(step_ns - (timed.waited_ns - waited_ns))
        channel.run.seconds = (time.monotonic_ns() - start_ns) * 1e-9
        while core.step():
            pass  # what was launched ahead
        core.close()
        if any(len(ids) != load.num_output_tokens for ids in channel.run.tokens.values()):
            raise CheckFailed("a request has not the tokens that it asked for")
        return channel.run

    # ------------------------------------------------------------ engines

    def _engine(self, variant: Variant) -> tuple[CoreConfig, ModelRunner]:
        if self._loaded is None or self._loaded[0] != variant:
            self._unload()
            device = self._new_device()
            device.overlaps = variant.overlaps
            if not variant.replays_graphs:
                device.replayed_kernels = ()
            config = self._config(device, CacheConfig(num_blocks=self._sizes.num_blocks))
            self._loaded = (variant, config, ModelRunner(config, device))
        return self._loaded[1:]

    def _config(
        self,
        device: ComputeDevice,
        cache: CacheConfig,
        kernels: str = "triton",
        dtype: str = "auto",
    ) -> CoreConfig:
        model = ModelConfig(
            str(self._model_dir),
            self._shape.name,
            dtype=dtype,
            load_format="dummy",
            kernels=kernels,
        )
        open_sizes = SchedulerConfig(max_num_seqs=0, max_num_batched_tokens=0)
        return sized_for(CoreConfig(model, cache, open_sizes), device)

    def _unload(self) -> None:
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Its own for every seed: no prefix is cached."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]
