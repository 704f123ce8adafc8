"""Logprobs of the embedded model's prompts are those that transformers computes, within 1e-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from tests.engine_loop import EngineLoop

BLOCK_SIZE = 16
TEXTS = [
    "In 1969, Neil Armstrong became the first person to walk on the surface of the Moon. " * 3,
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fib",
]


def test_prompt_logprobs_are_those_of_transformers(embedded_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    runner = ModelRunner(
        CoreConfig(
            model=ModelConfig(str(embedded_model_dir), "embedded", quantization="none"),
            cache=CacheConfig(num_blocks=32, kv_cache_dtype="float32"),
        )
    )
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    stopping = StoppingCriteria(max_tokens=1)
    requests = [Request(f"r{i}", 0, ids, sampling, stopping) for i, ids in enumerate(prompts)]
    # Both at once, and the longer one in chunks.
    outputs = EngineLoop(runner, BLOCK_SIZE, token_budget=40).run(requests)

    reference = AutoModelForCausalLM.from_pretrained(embedded_model_dir, dtype=torch.float32)
    for i, ids in enumerate(prompts):
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [e for o in outputs if o.request_id == f"r{i}" for e in o.new_prompt_logprobs]
        assert len(entries) == len(ids) - 1
        want = [float(expected[place, token_id]) for place, token_id in enumerate(ids[1:])]
        assert [entry.logprob for entry in entries] == pytest.approx(want, abs=1e-3)
        best = expected.max(dim=-1).values.tolist()[:-1]
        assert [entry.top_logprobs[0] for entry in entries] == pytest.approx(best, abs=1e-3)
