"""python -m engine_service.bench_sampler: what sampling costs, as JSON: microseconds per row, by
backend. All threads take part.

Rows are random logits of a vocabulary of 49,152. At temperature 0.8 some tens of tokens make up
90 % of a row; at 2 it takes thousands ("wide"). Each figure is the median of some steps, of one
kind of request, at one number of rows.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import Tensor

from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request
from engine_service.sampler import plan_sampling
from kernels.cpu.library import set_num_threads
from kernels.sampling_ops import SamplingOps, cpu_sampling_ops, reference_sampling_ops

VOCAB_SIZE = 49_152
NUM_ROWS = (1, 32, 256)
NUM_PROMPT_TOKENS = 500
NUM_OUTPUT_TOKENS = 200

KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_p_wide": SamplingParams(temperature=2.0, top_p=0.9),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "logprobs": SamplingParams(temperature=0.0, num_logprobs=5),
    "bad_words": SamplingParams(
        temperature=0.0, bad_token_sequences=tuple((i, i + 1, i + 2) for i in range(20))
    ),
}


def measure(ops: SamplingOps, num_steps: int = 9) -> dict[str, float]:
    """Microseconds per row, by "sampler_<kind>_<rows>_rows_us"."""
    set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(max(NUM_ROWS), VOCAB_SIZE, generator=generator) * 4.0
    return {
        f"sampler_{kind}_{num_rows}_rows_us": _us_per_row(
            logits_RV[:num_rows], params, ops, num_steps
        )
        for kind, params in KINDS.items()
        for num_rows in NUM_ROWS
    }


@torch.inference_mode()
def _us_per_row(
    logits_RV: Tensor, params: SamplingParams, ops: SamplingOps, num_steps: int
) -> float:
    num_rows = logits_RV.shape[0]
    requests = [_request(row, params) for row in range(num_rows)]
    step_logits_RV = torch.empty_like(logits_RV)
    seconds = []
    for _ in range(num_steps + 1):  # the first one warms up
        step_logits_RV.copy_(logits_RV)
        start = time.perf_counter()
        plan_sampling(requests, None, VOCAB_SIZE, ops).launch(step_logits_RV).wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) * 1e6 / num_rows


def _request(row: int, params: SamplingParams) -> Request:
    prompt = [(row + 7 * i) % VOCAB_SIZE for i in range(NUM_PROMPT_TOKENS)]
    request = Request(f"r{row}", 0, prompt, params, StoppingCriteria(max_tokens=10_000))
    for i in range(NUM_OUTPUT_TOKENS):
        request.append_output((row + 11 * (i % 150)) % VOCAB_SIZE)
    return request


def main() -> None:
    backends = {"cpu": cpu_sampling_ops(), "reference": reference_sampling_ops()}
    figures = {
        backend: {name: round(us, 1) for name, us in measure(ops).items()}
        for backend, ops in backends.items()
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
