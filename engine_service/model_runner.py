"""Loads a model and computes steps: a `SchedulerOutput` in, one token per sampling request out.

Owns the weights and the KV cache tensor; which block belongs to whom is the scheduler's affair.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import torch

from engine_service.config import CoreConfig
from engine_service.decoder_loader import load_decoder, uses_cpu_kernels
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.input_batch import build_input_batch
from engine_service.kv_cache_pool import allocate_kv_cache, plan_kv_cache
from engine_service.logprobs import prompt_logprobs
from engine_service.messages import TokenLogprobs
from engine_service.model_error import ModelError
from engine_service.model_loader import Checkpoint, check_shapes
from engine_service.models.config import read_config, read_eos_token_ids
from engine_service.models.weights import expected_shapes, ignored_tensors
from engine_service.request import RequestKey
from engine_service.sampler import sample_tokens
from engine_service.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    SchedulerOutput,
    StepDone,
    StepUnderWay,
)
from kernels.cpu.library import set_num_threads
from kernels.ops import op_backends
from kernels.sampling_ops import cpu_sampling_ops, reference_sampling_ops

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Used by one thread. The constructor raises ModelError on what cannot be served."""

    def __init__(self, config: CoreConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model_dir = Path(config.model.model_dir)
        model = read_config(model_dir)
        self._device = _pick_device(config.model.device)
        dtype = _pick_dtype("dtype", config.model.dtype, _auto_dtype(model.dtype, self._device))
        cpu_kernels = uses_cpu_kernels(config.model, self._device, dtype)
        kv_dtype = _pick_kv_dtype(config.cache.kv_cache_dtype, dtype, cpu_kernels)
        if cpu_kernels:
            set_num_threads(torch.get_num_threads())
        num_weights = sum(math.prod(shape) for shape in expected_shapes(model).values())
        plan = plan_kv_cache(
            model,
            config.cache,
            config.model.max_model_len,
            kv_dtype,
            self._device,
            weight_bytes=num_weights * dtype.itemsize,
        )
        with Checkpoint(model_dir) as checkpoint:
            check_shapes(checkpoint.shapes, expected_shapes(model), ignored_tensors(model))
            loaded = load_decoder(
                model,
                checkpoint,
                lambda name: checkpoint.load(name, dtype, self._device),
                config.model,
                plan.max_model_len,
                cpu_kernels,
            )
            self.weights_digest = checkpoint.digest()
        self._decoder = loaded.decoder
        self._copy = loaded.copy_blocks
        self._sampling_ops = cpu_sampling_ops() if cpu_kernels else reference_sampling_ops()
        self._kv_cache = allocate_kv_cache(model, plan, kv_dtype, self._device)
        self._block_size = plan.block_size

        self.num_blocks = plan.num_blocks
        self.max_model_len = plan.max_model_len
        self.architecture = model.architecture
        self.vocab_size = model.vocab_size
        self.eos_token_ids = read_eos_token_ids(model_dir, model)
        self.device_name = self._device.type
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

    overlaps = False

    def launch(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> StepUnderWay:
        return StepDone(self.execute_model(scheduler_output, token_bitmask))

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, token_bitmask: GrammarBitmask | None
    ) -> ModelRunnerOutput:
        """Writes the step's KV and samples. The bitmask's rows count the requests that sample.

        A request whose logits are unusable is in `failures`; what is raised concerns all.
        """
        if not scheduler_output.scheduled:
            return ModelRunnerOutput(sampled_token_ids={})
        self._copy_blocks(scheduler_output.block_copies)
        batch = build_input_batch(scheduler_output.scheduled, self._block_size, self._device)
        batch_ns = time.monotonic_ns()
        hidden_TH = self._decoder.forward(batch, self._kv_cache)
        forward_ns = time.monotonic_ns()
        told, failures = prompt_logprobs(
            scheduler_output.scheduled,
            lambda rows: self._decoder.logits(hidden_TH[rows.start : rows.stop]),
            self._sampling_ops,
        )
        requests = batch.sampling_requests
        token_ids: dict[RequestKey, int] = {}
        logprobs: dict[RequestKey, TokenLogprobs] = {}
        if requests:
            logits_RV = self._decoder.logits(hidden_TH.index_select(0, batch.logits_indices))
            sampled = sample_tokens(logits_RV, requests, token_bitmask, self._sampling_ops)
            for request, token in zip(requests, sampled, strict=True):
                if token.failure is not None:
                    failures[request.key] = token.failure
                    continue
                token_ids[request.key] = token.token_id
                if token.logprobs is not None:
                    logprobs[request.key] = token.logprobs
        return ModelRunnerOutput(token_ids, logprobs, failures, told, batch_ns, forward_ns)

    def _copy_blocks(self, copies: list[BlockCopy]) -> None:
        if copies:
            sources, destinations = torch.tensor(copies, device=self._device).T.contiguous()
            self._copy(self._kv_cache, sources, destinations)


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ModelError(f"The device {name!r} is not one of auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("The device cuda was asked for, but torch sees none.")
    return torch.device(name)


def _auto_dtype(checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where it is the fastest; else the checkpoint's own."""
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(checkpoint_dtype, torch.bfloat16)


def _pick_dtype(field: str, name: str, auto: torch.dtype) -> torch.dtype:
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise ModelError(f"The {field} {name!r} is not one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _pick_kv_dtype(name: str, dtype: torch.dtype, cpu_kernels: bool) -> torch.dtype:
    """auto: half precision where the kernels read it as fast as it comes, else the model's."""
    kv_dtype = _pick_dtype("kv_cache_dtype", name, torch.float16 if cpu_kernels else dtype)
    if cpu_kernels and kv_dtype == torch.bfloat16:
        raise ModelError("The cpu kernels keep the KV cache in float32 or float16 only.")
    return kv_dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
