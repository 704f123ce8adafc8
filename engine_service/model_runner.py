"""Loads a model and computes steps: a `SchedulerOutput` in, one token per sampling request out.

Owns the weights and the KV cache tensor; which block belongs to whom is the scheduler's affair.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from engine_service.config import CoreConfig
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.input_batch import build_input_batch
from engine_service.kv_cache_pool import allocate_kv_cache, plan_kv_cache
from engine_service.logprobs import prompt_logprobs
from engine_service.messages import TokenLogprobs
from engine_service.model_error import ModelError
from engine_service.model_loader import Checkpoint, check_shapes
from engine_service.models.config import DecoderConfig, read_config, read_eos_token_ids
from engine_service.models.decoder import Decoder
from engine_service.models.weights import (
    DecoderWeights,
    expected_shapes,
    ignored_tensors,
    load_weights,
)
from engine_service.request import RequestKey
from engine_service.sampler import sample_tokens
from engine_service.scheduler_output import BlockCopy, ModelRunnerOutput, SchedulerOutput
from kernels.ops import Ops, batch_invariant_ops, op_backends, reference_ops
from kernels.reference.row_tiles import NotBatchInvariant

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Used by one thread. The constructor raises ModelError on what cannot be served."""

    def __init__(self, config: CoreConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if config.model.quantization != "none":
            raise ModelError(f"quantization {config.model.quantization!r} is not supported.")
        model_dir = Path(config.model.model_dir)
        model = read_config(model_dir)
        self._device = _pick_device(config.model.device)
        dtype = _pick_dtype("dtype", config.model.dtype, _auto_dtype(model.dtype, self._device))
        kv_dtype = _pick_dtype("kv_cache_dtype", config.cache.kv_cache_dtype, dtype)
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
            weights = load_weights(model, lambda name: checkpoint.load(name, dtype, self._device))
            self.weights_digest = checkpoint.digest()
        self._ops = _pick_ops(model, weights, config.model.batch_invariant)
        self._decoder = Decoder(model, weights, self._ops, plan.max_model_len)
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
        self.op_backends = op_backends(self._ops)
        _log.info(
            "%s on %s in %s with %d threads. %s",
            self.architecture,
            self.device_name,
            self.dtype_name,
            torch.get_num_threads(),
            plan,
        )

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
        hidden = self._decoder.forward(batch, self._kv_cache)
        told, failures = prompt_logprobs(
            scheduler_output.scheduled,
            lambda rows: self._decoder.logits(
                hidden, torch.arange(rows.start, rows.stop, device=self._device)
            ),
        )
        requests = batch.sampling_requests
        token_ids: dict[RequestKey, int] = {}
        logprobs: dict[RequestKey, TokenLogprobs] = {}
        if requests:
            logits_RV = self._decoder.logits(hidden, batch.logits_indices)
            sampled = sample_tokens(logits_RV, requests, token_bitmask, self._ops)
            for request, token in zip(requests, sampled, strict=True):
                if token.failure is not None:
                    failures[request.key] = token.failure
                    continue
                token_ids[request.key] = token.token_id
                if token.logprobs is not None:
                    logprobs[request.key] = token.logprobs
        return ModelRunnerOutput(token_ids, logprobs, failures, told)

    def _copy_blocks(self, copies: list[BlockCopy]) -> None:
        if copies:
            sources, destinations = torch.tensor(copies, device=self._device).T.contiguous()
            self._ops.copy_blocks(self._kv_cache, sources, destinations)


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


def _pick_ops(model: DecoderConfig, weights: DecoderWeights, batch_invariant: bool) -> Ops:
    if not batch_invariant:
        return reference_ops()
    layer = weights.layers[0]  # the others have the same shapes
    matrices = (layer.qkv_OH, layer.output_HO, layer.gate_up_GH, layer.down_HF, weights.head_VH)
    try:
        return batch_invariant_ops(matrices, model.num_kv_heads, model.head_dim)
    except NotBatchInvariant as error:
        raise ModelError(
            "batch_invariant cannot be had on this machine: a row of a matrix product depends on "
            "its place in the batch; try another num_threads, dtype or device."
        ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
