"""w1 of `firsttoken bench` through OpenVINO GenAI in its own process: no HTTP, no streaming cost.

    scripts/peers.sh bench DIR openvino [--weights int8] [-c CONCURRENCY] [-n REQUESTS] [--seed S]

Closed loop: as many requests as `-c` says run at a time, and one that ends is replaced at once. A
token's time is the end of the step that made it. Prints one JSON object, times in milliseconds.
Runs in the peer's environment, which has nothing of ours but what this file imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import openvino_genai  # type: ignore[import-not-found]  # the peer's environment has it

from clients.bench.distribution import Distribution
from clients.bench.workloads import FIRST_INDEX, Prompt, PromptKind, PromptSource, Workload

CACHE_GIB = 2
MAX_NUM_SEQS = 64


@dataclass(slots=True, eq=False)
class Answer:
    """One request's tokens by the time they came, in seconds of `time.perf_counter`."""

    handle: openvino_genai.GenerationHandle
    sent: float
    token_times: list[float] = field(default_factory=list)

    def read(self, now: float) -> bool:
        """Notes the tokens of the last step, which ended `now`; whether the request ended too."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.token_times += [now] * len(output.generated_ids)
        return bool(self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING)


def load(model_dir: Path) -> openvino_genai.ContinuousBatchingPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = MAX_NUM_SEQS
    properties = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    return openvino_genai.ContinuousBatchingPipeline(str(model_dir), scheduler, "CPU", properties)


def closed_loop(
    pipeline: openvino_genai.ContinuousBatchingPipeline, prompts: list[Prompt], concurrency: int
) -> list[Answer]:
    running: list[Answer] = []
    ended: list[Answer] = []
    num_sent = 0
    while len(ended) < len(prompts):
        while num_sent < len(prompts) and len(running) < concurrency:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = prompts[num_sent].max_tokens
            config.ignore_eos = True
            handle = pipeline.add_request(num_sent, prompts[num_sent].text, config)
            running.append(Answer(handle, sent=time.perf_counter()))
            num_sent += 1
        pipeline.step()
        now = time.perf_counter()
        ended_now = [answer for answer in running if answer.read(now)]
        running = [answer for answer in running if answer not in ended_now]
        ended += ended_now
    return ended


def milliseconds(values: list[float]) -> dict[str, float] | None:
    spread = Distribution.of(values)
    if spread is None:
        return None
    return {f"p{p}": round(v * 1e3, 2) for p, v in ((50, spread.p50), (99, spread.p99))}


def report(answers: list[Answer], wall_seconds: float) -> dict[str, object]:
    num_tokens = sum(len(answer.token_times) for answer in answers)
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    return {
        "output_tokens": num_tokens,
        "output_tokens_per_second": round(num_tokens / wall_seconds, 2),
        "ttft_ms": milliseconds([answer.token_times[0] - answer.sent for answer in answers]),
        "itl_ms": milliseconds(gaps),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, help="the directory that holds fp32 and int8")
    parser.add_argument("--weights", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("-c", "--concurrency", type=int, default=1)
    parser.add_argument("-n", "--requests", type=int, help="as many as `firsttoken bench` sends")
    parser.add_argument("--seed", default="0")
    flags = parser.parse_args()

    source = PromptSource(flags.seed, flags.concurrency)
    num_requests = flags.requests or Workload.W1.num_requests(flags.concurrency)
    indices = range(FIRST_INDEX, FIRST_INDEX + num_requests)
    prompts = [source.prompt(PromptKind.W1, index) for index in indices]

    start = time.perf_counter()
    pipeline = load(flags.models / flags.weights)
    load_seconds = time.perf_counter() - start
    closed_loop(pipeline, [source.prompt(PromptKind.W1, FIRST_INDEX - 1)], concurrency=1)

    start = time.perf_counter()
    answers = closed_loop(pipeline, prompts, flags.concurrency)
    figures = report(answers, time.perf_counter() - start)
    run = {"weights": flags.weights, "concurrency": flags.concurrency, "requests": num_requests}
    print(json.dumps({**run, "load_seconds": round(load_seconds, 2), **figures}))


if __name__ == "__main__":
    main()
