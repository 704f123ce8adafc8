"""python -m engine_service.bench_model: milliseconds of one step of the model, by mode.

    decode    one token of each of 1, 8 and 32 requests, whose contexts have so many tokens
    prefill   one request's chunk of 128 tokens, at the start of its context and far into it

Everything from scheduled shares to sampled tokens, without scheduler and transport. Each figure is
the fastest of some steps, as others disturb.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Final

from engine_service.bench_quality import Mode
from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.model_store import resolve_model
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest, SchedulerOutput

PREFILL_TOKENS: Final = 128
_BLOCK_SIZE: Final = 16


class StepTimer:
    """Steps of a model whose requests' contexts are there already."""

    def __init__(self, model_dir: Path, mode: Mode, num_requests: int, max_tokens: int) -> None:
        self._blocks_each = -(-max_tokens // _BLOCK_SIZE)
        self._runner = ModelRunner(
            CoreConfig(
                ModelConfig(
                    str(model_dir), "bench", kernels=mode.kernels, quantization=mode.quantization
                ),
                CacheConfig(
                    _BLOCK_SIZE,
                    num_blocks=num_requests * self._blocks_each,
                    kv_cache_dtype=mode.kv_cache_dtype,
                ),
                SchedulerConfig(num_requests, max_num_batched_tokens=num_requests * max_tokens),
            )
        )
        self._num_tokens = max_tokens

    def fill(self, number: int, num_tokens: int) -> None:
        """Computes the start of a request's context."""
        for start in range(0, num_tokens, PREFILL_TOKENS):
            self._step([self._share(number, start, min(PREFILL_TOKENS, num_tokens - start))])

    def decode_ms(self, batch: int, context: int, num_steps: int) -> float:
        shares = [self._share(number, context - 1, 1) for number in range(batch)]
        return min(self._step(shares) for _ in range(num_steps))

    def prefill_ms(self, context: int, num_steps: int) -> float:
        shares = [self._share(0, context, PREFILL_TOKENS)]
        return min(self._step(shares) for _ in range(num_steps))

    def _step(self, shares: list[ScheduledRequest]) -> float:
        num_tokens = sum(share.num_scheduled_tokens for share in shares)
        start = time.perf_counter()
        self._runner.execute_model(SchedulerOutput(1, shares, num_tokens), None)
        return (time.perf_counter() - start) * 1000

    def _share(self, number: int, first: int, count: int) -> ScheduledRequest:
        request = Request(
            f"r{number}",
            0,
            [20 + (7 * number + 13 * i) % 40_000 for i in range(self._num_tokens)],
            SamplingParams(temperature=0.0),
            StoppingCriteria(max_tokens=1),
        )
        blocks = range(number * self._blocks_each, (number + 1) * self._blocks_each)
        return ScheduledRequest.of(request, first, count, list(blocks))


def measure(model_dir: Path, mode: Mode, num_steps: int = 7) -> dict[str, float]:
    figures: dict[str, float] = {}
    timer = StepTimer(model_dir, mode, num_requests=32, max_tokens=1024)
    for number in range(32):
        timer.fill(number, 1000)
    for context in (128, 1000):
        for batch in (1, 8, 32):
            figures[f"decode_{batch}x{context}_ms"] = timer.decode_ms(batch, context, num_steps)
    long_timer = StepTimer(model_dir, mode, num_requests=1, max_tokens=4224)
    long_timer.fill(0, 4096)
    for context in (0, 1024, 4096):
        figures[f"prefill_128_at_{context}_ms"] = long_timer.prefill_ms(context, num_steps)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_model", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="directory or hub id; none: the embedded model")
    parser.add_argument("--kernels", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", default="float16")
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model)
    modes = [
        Mode(arguments.kernels, quantization, arguments.kv_cache_dtype)
        for quantization in arguments.quantization
    ]
    parts = {str(mode): measure(model_dir, mode) for mode in modes}
    for name, figures in parts.items():
        print(name)
        for step, milliseconds in figures.items():
            print(f"    {step:<24} {milliseconds:9.2f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(parts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
