"""The step that needs the most memory: a prompt that takes the budget, beside all other streams."""

from __future__ import annotations

import torch

from engine_service.compute_device import ComputeDevice
from engine_service.config import SchedulerConfig
from engine_service.input_batch import build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.models.config import DecoderConfig
from engine_service.models.decoder import StepDecoder
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest

_BLOCK_SIZE = 16


@torch.inference_mode()
def run_largest_step(
    decoder: StepDecoder,
    model: DecoderConfig,
    config: SchedulerConfig,
    kv_dtype: torch.dtype,
    device: ComputeDevice,
) -> None:
    """Computes one, in a KV cache of its own, up to the logits."""
    num_streams = config.max_num_running - 1
    num_prompt_tokens = config.max_num_batched_tokens - num_streams
    block_ids = range(-(-num_prompt_tokens // _BLOCK_SIZE))
    sampling, stopping = SamplingParams(), StoppingCriteria(max_tokens=1)
    shares = [
        ScheduledRequest.of(
            Request(str(number), 0, [0] * num_tokens, sampling, stopping), 0, num_tokens, block_ids
        )
        for number, num_tokens in enumerate([num_prompt_tokens] + [1] * num_streams)
    ]
    batch = build_input_batch(shares, _BLOCK_SIZE, device)
    shape = (
        model.num_layers,
        2,
        len(block_ids),
        _BLOCK_SIZE,
        model.num_kv_heads,
        model.head_dim,
    )
    kv_cache = torch.empty(shape, dtype=kv_dtype, device=device.torch_device)
    hidden_TH = decoder.forward(batch, kv_cache)
    decoder.logits(hidden_TH.index_select(0, batch.logits_indices))
