"""Loads a model and computes steps: a `SchedulerOutput` in, one token per sampling request out.

Owns the weights and the KV cache tensor; which block belongs to whom is the scheduler's affair. A
step is launched by one call and waited for by another: where the device computes beside the host,
the next one may be launched in between.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine_service.compute_device import ComputeDevice, pick_device
from engine_service.config import CoreConfig
from engine_service.decode_graphs import DecodeGraphs
from engine_service.decoder_loader import load_decoder, pick_kernels, pick_sampling_ops
from engine_service.dummy_checkpoint import open_checkpoint
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.input_batch import InputBuffers, LastTokens
from engine_service.kv_cache_pool import allocate_kv_cache, plan_kv_cache
from engine_service.largest_step import LargestStep
from engine_service.logprobs import PromptRows, prompt_logprobs, prompt_rows
from engine_service.messages import SamplingParams, StoppingCriteria, TokenLogprobs
from engine_service.model_error import ModelError
from engine_service.model_loader import check_shapes
from engine_service.models.config import read_config, read_eos_token_ids
from engine_service.models.weights import expected_shapes, ignored_tensors
from engine_service.request import Request, RequestKey
from engine_service.sampler import SamplingUnderWay, plan_sampling
from engine_service.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepDone,
    StepUnderWay,
)
from kernels.cpu.library import set_num_threads
from kernels.ops import op_backends

_log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)
_DRAWN_AND_TOLD = SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=1, num_prompt_logprobs=1)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Step:
    """Under way, or over."""

    sampling: SamplingUnderWay
    requests: Sequence[Request]  # that sample
    prompts: Sequence[PromptRows]
    batch_ns: int
    forward_ns: int

    def wait(self) -> ModelRunnerOutput:
        token_ids: dict[RequestKey, int] = {}
        logprobs: dict[RequestKey, TokenLogprobs] = {}
        sampled = self.sampling.wait()
        prompts_told, failures = prompt_logprobs(self.prompts, sampled.given)
        for request, token in zip(self.requests, sampled.tokens, strict=True):
            if token.failure is not None:
                failures[request.key] = token.failure
                continue
            token_ids[request.key] = token.token_id
            if token.logprobs is not None:
                logprobs[request.key] = token.logprobs
        return ModelRunnerOutput(
            token_ids, logprobs, failures, prompts_told, self.batch_ns, self.forward_ns
        )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A step that samples nothing and tells nothing, under way or over."""

    output: ModelRunnerOutput
    wait_for_device: Callable[[], None]

    def wait(self) -> ModelRunnerOutput:
        self.wait_for_device()
        return self.output


class ModelRunner:
    """Used by one thread. The constructor raises ModelError on what cannot be served."""

    def __init__(self, config: CoreConfig, device: ComputeDevice | None = None) -> None:
        """`device`: None: the one that the config names."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model_dir = Path(config.model.model_dir)
        model = read_config(model_dir)
        self._device = pick_device(config.model.device) if device is None else device
        auto_dtype = self._device.auto_dtype(_DTYPES.get(model.dtype, torch.bfloat16))
        dtype = _pick_dtype("dtype", config.model.dtype, auto_dtype)
        kernels = pick_kernels(config.model, self._device, dtype)
        kv_dtype = _pick_kv_dtype(config.cache.kv_cache_dtype, dtype, kernels)
        if kernels == "cpu":
            set_num_threads(torch.get_num_threads())
        with open_checkpoint(model_dir, config.model.load_format, model) as checkpoint:
            check_shapes(checkpoint.shapes, expected_shapes(model), ignored_tensors(model))
            loaded = load_decoder(
                model,
                checkpoint,
                lambda name: checkpoint.load(name, dtype, self._device.torch_device),
                config.model,
                kernels,
            )
            self.weights_digest = checkpoint.digest()
        self._decoder = loaded.decoder
        self._copy_blocks = loaded.copy_blocks
        self._sampling_ops = pick_sampling_ops(kernels)
        self.vocab_size = model.vocab_size

        longest = model.max_position_embeddings
        max_len = min(config.model.max_model_len or longest, longest)
        largest = LargestStep(
            self._decoder, model, config.scheduler, max_len, kv_dtype, self._device
        )
        plan = plan_kv_cache(
            model,
            config.cache,
            config.model.max_model_len,
            kv_dtype,
            weight_bytes=sum(map(math.prod, expected_shapes(model).values())) * dtype.itemsize,
            find_bytes=lambda: self._device.kv_cache_bytes(config.cache, largest.run),
        )
        self._kv_cache = allocate_kv_cache(model, plan, kv_dtype, self._device.torch_device)
        max_requests = config.scheduler.max_num_running
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self._inputs = InputBuffers(
            self._device,
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_requests=max_requests,
            max_blocks=max_blocks,
            block_size=plan.block_size,
            spare_block=plan.num_blocks,
        )
        self.overlaps = self._device.overlaps
        self._last: LastTokens | None = None  # of the step before, if the next is ahead of it
        self._graphs: DecodeGraphs | None = None
        if kernels in self._device.replayed_kernels:
            self._graphs = DecodeGraphs(
                self._device,
                self._decoder,
                self._kv_cache,
                max_requests=max_requests,
                max_blocks=max_blocks,
                vocab_size=model.vocab_size,
            )
            self._prepare(self._graphs, plan.num_blocks, max_blocks)

        self.num_blocks = plan.num_blocks
        self.max_model_len = plan.max_model_len
        self.architecture = model.architecture
        self.eos_token_ids = read_eos_token_ids(model_dir, model)
        self.device_name = self._device.torch_device.type
        self.dtype_name = _dtype_name(dtype)
        self.kv_cache_dtype_name = _dtype_name(kv_dtype)
        self.op_backends = loaded.op_backends | op_backends(self._sampling_ops)
        self.quantization = loaded.quantization
        self.batch_invariant = loaded.batch_invariant
        _log.info(
            "%s on %s in %s, quantization %s, KV cache in %s, with %d threads. %s",
            self.architecture,
            self.device_name,
            self.dtype_name,
            self.quantization,
            self.kv_cache_dtype_name,
            torch.get_num_threads(),
            plan,
        )

    def execute_model(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> ModelRunnerOutput:
        return self.launch(scheduler_output, token_bitmask).wait()

    @torch.inference_mode()
    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        """Writes the step's KV and samples. The bitmask's rows count the requests that sample.

        A request whose logits are unusable is in `failures`; what is raised concerns all.
        """
        if not scheduler_output.scheduled:
            return StepDone(ModelRunnerOutput(sampled_token_ids={}))
        try:
            return self._launch(scheduler_output, token_bitmask)
        except torch.OutOfMemoryError:
            self._device.release_unused_memory()
            raise

    def _launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        scheduled, copies = scheduler_output.scheduled, scheduler_output.block_copies
        graphs = self._graphs
        if graphs is not None and not all(map(_is_single_token, scheduled)):
            graphs = None
        fill_to = None if graphs is None else graphs.size_for(len(scheduled))
        requests = scheduler_output.sampling_requests
        prompts = prompt_rows(scheduled, self.vocab_size) if graphs is None else []
        planned = plan_sampling(
            requests,
            token_bitmask,
            self.vocab_size,
            self._sampling_ops,
            [prompt.next_tokens for prompt in prompts],
        )
        batch = self._inputs.build(scheduled, copies, self._last, fill_to, planned.rows.arrays)
        if copies:
            self._copy_blocks(self._kv_cache, batch.copy_sources, batch.copy_destinations)
        batch_ns = time.monotonic_ns()
        if graphs is not None:
            logits_RV = graphs.logits(batch)[: len(requests)]
        else:
            hidden_TH = self._decoder.forward(batch, self._kv_cache)
        forward_ns = time.monotonic_ns()
        if not (requests or prompts):
            self._last = None
            output = ModelRunnerOutput({}, batch_ns=batch_ns, forward_ns=forward_ns)
            return _Chunks(output, self._device.mark())
        if graphs is None:
            if len(requests) < len(hidden_TH):
                hidden_RH = hidden_TH.index_select(0, batch.logits_indices)
            else:
                hidden_RH = hidden_TH  # each of them samples
            logits_RV = self._logits(hidden_RH)
        prompt_logits = (self._logits(hidden_TH[p.rows.start : p.rows.stop]) for p in prompts)
        sampling = planned.launch(logits_RV, batch.extras, prompt_logits)
        if self.overlaps:
            rows = {request.key: row for row, request in enumerate(requests)}
            self._last = LastTokens(rows, sampling.rows.token_ids_R)
        return _Step(sampling, requests, prompts, batch_ns, forward_ns)

    def _logits(self, hidden_RH: Tensor) -> Tensor:
        """Of any number of rows; valid until the next call."""
        if len(hidden_RH) == 0:
            return hidden_RH.new_empty((0, self.vocab_size), dtype=torch.float32)
        return self._decoder.logits(hidden_RH)

    @torch.inference_mode()
    def _prepare(self, graphs: DecodeGraphs, spare_block: int, max_blocks: int) -> None:
        """Captures steps and compiles kernels before there are requests whose time that takes.

        The step that needs the most memory is captured first: the others' is found in what it took.
        """
        widest = _spare_share([0], _GREEDY, [spare_block] * max_blocks)
        graphs.logits(self._inputs.build([widest], fill_to=graphs.sizes[-1]))
        one = _spare_share([0], _GREEDY, [spare_block])
        for size in tqdm(
            reversed(graphs.sizes), "Capturing steps", disable=not sys.stderr.isatty(), unit="size"
        ):
            graphs.logits(self._inputs.build([one], fill_to=size))
        for params in (_GREEDY, _DRAWN_AND_TOLD):
            shares = [_spare_share(ids, params, [spare_block]) for ids in ([0, 0], [0])]
            copies = [BlockCopy(spare_block, spare_block)]
            self._launch(SchedulerOutput(0, shares, 3, copies), None).wait()
        self._last = None


def _spare_share(
    token_ids: list[int], params: SamplingParams, block_ids: Sequence[int]
) -> ScheduledRequest:
    """Of nobody's request."""
    request = Request("", 0, token_ids, params, StoppingCriteria(max_tokens=1))
    return ScheduledRequest.of(request, 0, len(token_ids), block_ids)


def _is_single_token(share: ScheduledRequest) -> bool:
    return share.num_scheduled_tokens == 1 and share.samples


def _pick_dtype(field: str, name: str, auto: torch.dtype) -> torch.dtype:
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise ModelError(f"The {field} {name!r} is not one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _pick_kv_dtype(name: str, dtype: torch.dtype, kernels: str) -> torch.dtype:
    """auto: half precision where the kernels read it as fast as it comes, else the model's."""
    kv_dtype = _pick_dtype("kv_cache_dtype", name, torch.float16 if kernels == "cpu" else dtype)
    if kernels == "cpu" and kv_dtype == torch.bfloat16:
        raise ModelError("The cpu kernels keep the KV cache in float32 or float16 only.")
    return kv_dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
