"""Tiny random models of every architecture give the ids that transformers' own generate gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.messages import SamplingParams
from engine_service.model_runner import ModelRunner
from tests.conftest import MakeTinyModel
from tests.engine_loop import LARGE_STEPS, EngineLoop

BLOCK_SIZE = 16
NUM_NEW = 24
PROMPT_LENGTHS = (1, 7, 16, 17, 40, 75)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    arch: str
    overrides: dict[str, object]


CASES = [
    Case("llama", "llama", {}),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-untied", "llama", {"tie_word_embeddings": False, "head_dim": 24}),
    Case(
        "llama-linear-rope",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    Case("llama-llama3-rope", "llama", {"rope_parameters": LLAMA3_ROPE}),
    Case("mistral-window", "mistral", {"sliding_window": 20}),
    Case("qwen2", "qwen2", {}),
    Case(
        "qwen2-window-from-layer-1",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    Case("qwen3", "qwen3", {"head_dim": 32}),
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(20, 49000, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def reference_ids(model_dir: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    results = []
    with torch.inference_mode():
        for ids in prompt_ids:
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                min_new_tokens=NUM_NEW,  # masks the end token, as no end token ids do here
                max_new_tokens=NUM_NEW,
            )
            results.append(output[0, len(ids) :].tolist())
    return results


def runner_for(model_dir: Path, kernels: str, num_blocks: int = 96) -> ModelRunner:
    return ModelRunner(
        CoreConfig(
            model=ModelConfig(str(model_dir), "tiny", kernels=kernels, quantization="none"),
            cache=CacheConfig(BLOCK_SIZE, num_blocks=num_blocks, kv_cache_dtype="float32"),
            scheduler=LARGE_STEPS,
        )
    )


# transformers masks id 2 until min_new_tokens; the same by bias, since eos_token_ids are empty.
NO_EOS = SamplingParams(temperature=0.0, logit_bias={2: -100.0})


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_ids_equal_transformers(
    case: Case, kernels: str, tiny_model_dir: MakeTinyModel
) -> None:
    model_dir = tiny_model_dir(case.arch, **case.overrides)
    prompt_ids = prompts()
    expected = reference_ids(model_dir, prompt_ids)
    assert len({tuple(ids) for ids in expected}) == len(expected)  # the model is not a constant

    runner = runner_for(model_dir, kernels)
    alone = [
        EngineLoop(runner, BLOCK_SIZE, token_budget=256).generate([ids], NUM_NEW, NO_EOS)[0]
        for ids in prompt_ids
    ]
    assert [request.output_token_ids for request in alone] == expected

    chunked = EngineLoop(runner, BLOCK_SIZE, token_budget=16)
    together = chunked.generate(prompt_ids, NUM_NEW, NO_EOS)
    assert [request.output_token_ids for request in together] == expected

    again = chunked.generate(prompt_ids, NUM_NEW, NO_EOS)
    assert [request.output_token_ids for request in again] == expected
    # each prompt was found up to its last token, also inside a block
    assert [request.num_cached_tokens for request in again] == [n - 1 for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_preemption_leaves_the_ids_alone(kernels: str, tiny_model_dir: MakeTinyModel) -> None:
    model_dir = tiny_model_dir("llama")
    prompt_ids = prompts()

    def ids(num_blocks: int) -> tuple[list[list[int]], int]:
        loop = EngineLoop(runner_for(model_dir, kernels, num_blocks), BLOCK_SIZE, token_budget=64)

        def sampling(i: int) -> SamplingParams:
            if i % 2 == 0:
                return SamplingParams(temperature=0.0, frequency_penalty=0.5)
            return SamplingParams(temperature=0.9, seed=i, top_p=0.95)

        requests = loop.generate(prompt_ids, 60, sampling)
        return [request.output_token_ids for request in requests], loop.num_preemptions

    large, none = ids(96)
    small, some = ids(11)
    assert none == 0
    assert some > 0
    assert small == large
