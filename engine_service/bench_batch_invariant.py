"""What `--batch-invariant` costs: milliseconds of a step, with it and without.

Prefill is one request's chunk of 128 tokens; decode is one token of each of 1, 8 and 24 requests
whose contexts have 200 tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest, SchedulerOutput

PREFILL_TOKENS: Final = 128
CONTEXT_TOKENS: Final = 200
BATCHES: Final = (1, 8, 24)
_BLOCK_SIZE: Final = 16
_BLOCKS_EACH: Final = -(-CONTEXT_TOKENS // _BLOCK_SIZE)


def measure(model_dir: Path, num_steps: int = 5) -> dict[str, float]:
    """By "<plain or invariant>_<step>_ms"; the fastest of some steps, as others disturb."""
    figures: dict[str, float] = {}
    for name, batch_invariant in (("plain", False), ("invariant", True)):
        runner = ModelRunner(
            CoreConfig(
                ModelConfig(
                    str(model_dir), "bench", kernels="reference", batch_invariant=batch_invariant
                ),
                CacheConfig(_BLOCK_SIZE, num_blocks=max(BATCHES) * _BLOCKS_EACH),
                SchedulerConfig(max_num_batched_tokens=max(PREFILL_TOKENS, CONTEXT_TOKENS)),
            )
        )
        for number in range(max(BATCHES)):  # their contexts have to be there
            _milliseconds(runner, [_share(number, 0, CONTEXT_TOKENS - 1)])
        prefill = [_share(0, 0, PREFILL_TOKENS)]
        steps = {"prefill": prefill} | {
            f"decode_{batch}": [_share(i, CONTEXT_TOKENS - 1, 1) for i in range(batch)]
            for batch in BATCHES
        }
        for step, shares in steps.items():
            times = [_milliseconds(runner, shares) for _ in range(num_steps)]
            figures[f"{name}_{step}_ms"] = min(times)
    return figures


def _milliseconds(runner: ModelRunner, shares: list[ScheduledRequest]) -> float:
    num_tokens = sum(share.num_scheduled_tokens for share in shares)
    start = time.perf_counter()
    runner.execute_model(SchedulerOutput(1, shares, num_tokens), None)
    return (time.perf_counter() - start) * 1000


def _share(number: int, first: int, count: int) -> ScheduledRequest:
    request = Request(
        f"r{number}",
        0,
        [20 + 7 * number + i for i in range(CONTEXT_TOKENS)],
        SamplingParams(temperature=0.0),
        StoppingCriteria(max_tokens=1),
    )
    blocks = list(range(number * _BLOCKS_EACH, (number + 1) * _BLOCKS_EACH))
    return ScheduledRequest.of(request, first, count, blocks)
