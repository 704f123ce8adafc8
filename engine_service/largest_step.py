"""The steps that need the most memory: prompts that take the budget, beside all other streams;
and one token for each stream, at the widest block table, with all their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine_service.compute_device import ComputeDevice
from engine_service.config import SchedulerConfig
from engine_service.input_batch import build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.models.config import DecoderConfig
from engine_service.models.decoder import StepDecoder
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest

_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class LargestStep:
    decoder: StepDecoder
    model: DecoderConfig
    config: SchedulerConfig
    max_model_len: int
    kv_dtype: torch.dtype
    device: ComputeDevice

    @torch.inference_mode()
    def run(self) -> None:
        """Computes them, up to the logits, in a KV cache of their own."""
        num_streams = self.config.max_num_running
        num_tokens = self._fill_budget(num_streams)
        prompt_blocks = range(-(-max(num_tokens) // _BLOCK_SIZE))
        kv_cache = torch.empty(
            (
                self.model.num_layers,
                2,
                len(prompt_blocks),
                _BLOCK_SIZE,
                self.model.num_kv_heads,
                self.model.head_dim,
            ),
            dtype=self.kv_dtype,
            device=self.device.torch_device,
        )
        widest = [0] * -(-self.max_model_len // _BLOCK_SIZE)
        kept = [  # as long as both run, for what is kept beside steps is as large
            self._compute(num_tokens, prompt_blocks, kv_cache),
            self._compute([1] * num_streams, widest, kv_cache),
        ]
        del kept

    def _fill_budget(self, num_streams: int) -> list[int]:
        """Tokens of each stream: as few prompts as can be, none longer than the context."""
        num_left = self.config.max_num_batched_tokens - num_streams
        num_tokens = []
        for _ in range(num_streams):
            num_more = min(num_left, self.max_model_len - 1)
            num_tokens.append(1 + num_more)
            num_left -= num_more
        return num_tokens

    def _compute(
        self, num_tokens: Sequence[int], block_ids: Sequence[int], kv_cache: torch.Tensor
    ) -> torch.Tensor:
        sampling, stopping = SamplingParams(), StoppingCriteria(max_tokens=1)
        shares = [
            ScheduledRequest.of(
                Request(str(number), 0, [0] * count, sampling, stopping), 0, count, block_ids
            )
            for number, count in enumerate(num_tokens)
        ]
        batch = build_input_batch(shares, _BLOCK_SIZE, self.device)
        hidden_TH = self.decoder.forward(batch, kv_cache)
        return self.decoder.logits(hidden_TH.index_select(0, batch.logits_indices))
