"""transformers' generate on the same GPU, for `bench_gpu`: the same shapes, with random weights."""

from __future__ import annotations

import time
from functools import cached_property, partial

import torch

from engine_service.bench_gpu_engine import Load
from engine_service.bench_gpu_items import CheckFailed, Figures, Item
from engine_service.bench_gpu_shapes import ModelShape


class TransformersBench:
    """Static batches without padding, greedy, with its own defaults for attention and cache."""

    def __init__(self, shape: ModelShape, loads: tuple[Load, ...], device: torch.device) -> None:
        self._shape = shape
        self._loads = loads
        self._device = device

    def items(self) -> list[Item]:
        """Named as those of the engine."""
        return [Item(str(load), partial(self._generate, load)) for load in self._loads]

    @cached_property
    def _model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        shape = self._shape
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_model_len,
            tie_word_embeddings=shape.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with self._device:
            model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=getattr(torch, shape.dtype)
            )
        return model.eval()

    def _generate(self, load: Load) -> Figures:
        """Output tokens a second, prefill included, as the engine's; the faster of two runs."""
        seconds = min(self._seconds(load, seed) for seed in range(2))
        return {"output_tokens_s": load.num_requests * load.num_output_tokens / seconds}

    @torch.inference_mode()
    def _seconds(self, load: Load, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        shape = (load.num_requests, load.num_prompt_tokens)
        prompts = torch.randint(0, self._shape.vocab_size, shape, generator=generator)
        input_ids = prompts.to(self._device)
        model = self._model
        start = time.perf_counter()
        output = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=load.num_output_tokens,
            max_new_tokens=load.num_output_tokens,
            pad_token_id=0,
        )
        num_tokens = output.cpu().shape[1]  # waits for the device
        seconds = time.perf_counter() - start
        if num_tokens != load.num_prompt_tokens + load.num_output_tokens:
            raise CheckFailed(f"{num_tokens} tokens came back")
        return seconds
