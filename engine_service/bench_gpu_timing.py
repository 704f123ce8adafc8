"""Seconds that work takes on a GPU: medians, with the caches cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch

_COLD_BYTES: Final = 256 << 20  # several times a large GPU's cache
_NUM_CALLS: Final = 20  # that the host times


def device_seconds(call: Callable[[], object]) -> float:
    """Of work that takes the device longer than the host takes to launch it."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median")) * 1e-3


def num_copies(num_bytes: int) -> int:
    """Of what a call reads, so that none of it is cached when its turn comes again."""
    return -(-_COLD_BYTES // num_bytes) + 1


def replayed_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one of the calls, made one after the other in a captured graph: what launches cost the
    host does not count."""
    for call in calls[:2]:
        call()  # kernels are compiled and libraries loaded outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return device_seconds(graph.replay) / len(calls)


def host_seconds(call: Callable[[], object]) -> float:
    """Of a call that itself waits for the device."""
    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    for _ in range(_NUM_CALLS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)
