"""python -m engine_service.bench_core --json PATH: what the engine core costs beside its model.

    scheduler        us of schedule() and update, per running request and step (`simulate`)
    blocks           operations of the block pool a second, evictions among them
    sampler          us per row (`bench_sampler`)
    step             us of a step beside its forward, by part (`bench_step`)
    preemption       tokens computed again, and steps more, for each request preempted
    batch_invariant  ms a step of the model takes with and without the flag

Prints a table and writes the same figures as one JSON object of objects.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from engine_service.bench_batch_invariant import measure as measure_batch_invariant
from engine_service.bench_sampler import measure as measure_sampler
from engine_service.bench_step import measure as measure_step
from engine_service.block_pool import BlockPool
from engine_service.config import SchedulerConfig
from engine_service.model_store import resolve_model
from engine_service.simulate import Simulation, make_request, measure_bookkeeping, measure_flood
from kernels.sampling_ops import cpu_sampling_ops

_NUM_BLOCKS: Final = 4096
_CHAIN_BLOCKS: Final = 38  # of a request of 600 tokens

Figures = dict[str, float]


def measure_scheduler() -> Figures:
    cost = measure_bookkeeping()
    flood = measure_flood(
        SchedulerConfig(), 2048, flood_prompt=400, flood_output=100, num_flooding=400
    )
    return {**msgspec.to_builtins(cost), "flood_steps_later": flood.steps_later}


def measure_blocks(num_requests: int = 2_000) -> Figures:
    """Requests of 38 blocks come and go in a pool full of cached ones, so each block evicts one."""
    pool = BlockPool(_NUM_BLOCKS)
    num_chains = _NUM_BLOCKS // _CHAIN_BLOCKS + num_requests
    chains = [
        [hashlib.sha256(b"%d %d" % (chain, i)).digest() for i in range(_CHAIN_BLOCKS)]
        for chain in range(num_chains)
    ]
    token_ids = list(range(16))
    start_ns = 0
    for number, chain in enumerate(chains):
        if number == num_chains - num_requests:  # from here on the pool is full
            start_ns = time.thread_time_ns()
        blocks = pool.allocate(len(chain))
        parent = b""
        for block, block_hash in zip(blocks, chain, strict=True):
            pool.record(block, parent, token_ids)
            pool.publish(block, block_hash)
            parent = block_hash
        pool.free(reversed(blocks))
        found = [hit for h in chain if (hit := pool.lookup(h)) is not None]
        pool.touch(found)
        pool.free(reversed(found))
    seconds = (time.thread_time_ns() - start_ns) * 1e-9
    pool.check_integrity()
    # Each block was allocated, recorded, published, freed, looked up, touched and freed.
    return {"operations_per_second": 7 * _CHAIN_BLOCKS * num_requests / seconds}


def measure_preemption(num_requests: int = 64) -> Figures:
    """The same requests in a pool that holds all of them, and in one that holds a quarter."""
    blocks_each = 20  # of 100 + 220 tokens
    plenty = _preempting_run(num_requests, num_blocks=num_requests * blocks_each)
    scarce = _preempting_run(num_requests, num_blocks=num_requests * blocks_each // 4)
    num_preemptions = scarce["preemptions"]
    return {
        "preemptions": num_preemptions,
        "tokens_again_each": (scarce["tokens"] - plenty["tokens"]) / num_preemptions,
        "cpu_us_each": (scarce["cpu_us"] - plenty["cpu_us"]) / num_preemptions,
    }


def _preempting_run(num_requests: int, num_blocks: int) -> Figures:
    simulation = Simulation(SchedulerConfig(max_num_seqs=num_requests), num_blocks)
    for i in range(num_requests):
        prompt = [1_000 * i + j for j in range(100)]
        simulation.scheduler.add_request(make_request(f"r{i}", prompt, 220, arrival_ns=i))
    num_tokens = 0
    start_ns = time.thread_time_ns()
    while simulation.scheduler.has_unfinished_requests():
        num_tokens += simulation.step().num_scheduled_tokens
    return {
        "preemptions": simulation.scheduler.stats().num_preemptions,
        "tokens": num_tokens,
        "cpu_us": (time.thread_time_ns() - start_ns) / 1000,
    }


def measure_all(model_dir: Path) -> dict[str, Figures]:
    return {
        "scheduler": measure_scheduler(),
        "blocks": measure_blocks(),
        "sampler": measure_sampler(cpu_sampling_ops()),
        "step": measure_step(),
        "preemption": measure_preemption(),
        "batch_invariant": measure_batch_invariant(model_dir),
    }


def table(parts: Mapping[str, Figures]) -> str:
    width = max(len(name) for figures in parts.values() for name in figures)
    lines = [
        f"{part:<16} {name:<{width}} {value:>14,.2f}"
        for part, figures in parts.items()
        for name, value in figures.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_core", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="directory or hub id; none: the embedded model")
    parser.add_argument("--num-threads", type=int, help="of the compute kernels")
    arguments = parser.parse_args()
    if arguments.num_threads is not None:
        torch.set_num_threads(arguments.num_threads)
    parts = measure_all(resolve_model(arguments.model))
    print(table(parts))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(parts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
