"""python -m engine_service.bench_parts: where a step of the model goes, op by op, as JSON.

The decoder is made of single ops here, so that each can be timed; served, a step is one call, whose
time stands beside their sum as `one call`. What is between the ops is `dispatch`: Python, and
tensors made for what passes from op to op. Milliseconds, medians of some steps; contexts of 200
tokens, a prompt's first 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Final, ParamSpec, TypeVar

import torch

from engine_service.cpu_device import CpuDevice
from engine_service.input_batch import InputBatch, build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_loader import Checkpoint
from engine_service.model_store import resolve_model
from engine_service.models.config import DecoderConfig, read_config
from engine_service.models.decoder import Decoder, StepDecoder
from engine_service.models.fused_decoder import FusedDecoder
from engine_service.models.weights import DecoderWeights, load_weights, matrix_specs
from engine_service.packed_weights import pack_in_memory
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest
from kernels.cpu.library import set_num_threads
from kernels.cpu.linear import PackedMatrix, Quantization
from kernels.ops import Ops, cpu_ops

BATCHES: Final = {
    "decode 1": (1, 1),
    "decode 8": (8, 1),
    "decode 32": (32, 1),
    "prompt 128": (1, 128),
}
_CONTEXT_TOKENS: Final = 200
_BLOCK_SIZE: Final = 16
_CPU: Final = torch.device("cpu")

P = ParamSpec("P")
T = TypeVar("T")


class OpTimes:
    """Seconds by op, of the step that is being made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, op: Callable[P, T]) -> Callable[P, T]:
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            start = time.perf_counter()
            result = op(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return measured

    def ops(self) -> Ops[PackedMatrix]:
        plain = cpu_ops()
        timed = {
            field.name: self.timed(field.name, getattr(plain, field.name))
            for field in fields(plain)
        }
        return replace(plain, **timed)


def load(
    model_dir: Path, quantization: Quantization
) -> tuple[DecoderConfig, DecoderWeights[PackedMatrix]]:
    model = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:

        def tensor(name: str) -> torch.Tensor:
            return checkpoint.load(name, torch.float32, _CPU)

        packed = pack_in_memory(matrix_specs(model), quantization, tensor)
        return model, load_weights(model, tensor, lambda spec: packed[spec.name])


def batch_of(num_requests: int, num_tokens: int) -> InputBatch:
    """A token at the end of each request's context, or the start of a prompt."""
    computed = _CONTEXT_TOKENS - 1 if num_tokens == 1 else 0
    blocks_each = -(-(computed + num_tokens) // _BLOCK_SIZE)
    shares = []
    for number in range(num_requests):
        token_ids = [20 + (7 * number + 13 * i) % 40_000 for i in range(computed + num_tokens)]
        request = Request(
            f"r{number}",
            0,
            token_ids,
            SamplingParams(temperature=0.0),
            StoppingCriteria(max_tokens=1),
        )
        blocks = list(range(number * blocks_each, (number + 1) * blocks_each))
        shares.append(ScheduledRequest.of(request, computed, num_tokens, blocks))
    return build_input_batch(shares, _BLOCK_SIZE, CpuDevice())


@torch.inference_mode()
def milliseconds(decoder: StepDecoder, batch: InputBatch, kv_cache: torch.Tensor) -> float:
    start = time.perf_counter()
    hidden_TH = decoder.forward(batch, kv_cache)
    decoder.logits(hidden_TH.index_select(0, batch.logits_indices))
    return (time.perf_counter() - start) * 1000


def measure(
    model_dir: Path, quantization: Quantization, num_steps: int
) -> dict[str, dict[str, float]]:
    model, weights = load(model_dir, quantization)
    times = OpTimes()
    single = Decoder(model, weights, times.ops(), _CONTEXT_TOKENS)
    fused = FusedDecoder(model, weights, _CONTEXT_TOKENS)
    num_blocks = 32 * -(-_CONTEXT_TOKENS // _BLOCK_SIZE)
    shape = (model.num_layers, 2, num_blocks, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    kv_cache = torch.zeros(shape, dtype=torch.float16)
    figures: dict[str, dict[str, float]] = {}
    for name, (num_requests, num_tokens) in BATCHES.items():
        batch = batch_of(num_requests, num_tokens)
        steps: list[dict[str, float]] = []
        for _ in range(num_steps):
            times.seconds = {}
            whole = milliseconds(single, batch, kv_cache)
            parts = {op: seconds * 1000 for op, seconds in times.seconds.items()}
            parts["dispatch"] = whole - sum(parts.values())
            parts["op by op"] = whole
            parts["one call"] = milliseconds(fused, batch, kv_cache)
            steps.append(parts)
        figures[name] = {part: median(step[part] for step in steps) for part in steps[0]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_parts", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="directory or hub id; none: the embedded model")
    parser.add_argument("--quantization", default="int4", choices=("none", "int8", "int4"))
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    set_num_threads(torch.get_num_threads())
    figures = measure(resolve_model(arguments.model), arguments.quantization, arguments.steps)
    print(f"{'ms':<20}" + "".join(f"{name:>12}" for name in figures))
    for part in next(iter(figures.values())):
        print(f"{part:<20}" + "".join(f"{step[part]:12.2f}" for step in figures.values()))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
