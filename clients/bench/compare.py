"""Two servers under the same loads, in turns: A, B, A, B, …

Every run has new prompts, so that neither server meets one that its cache knows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from clients.bench.comparison import Pair
from clients.bench.progress import Progress
from clients.bench.report import Report
from clients.bench.run import Plan, run
from clients.bench.target import Target
from clients.bench.workloads import Sizes, Window, Workload

DEFAULT_LOADS = "w1@1/3,w1@8/16,w1@32/32,w2@8/16,w3@4/4,w4@8/16,w5@4"


@dataclass(frozen=True, slots=True)
class Load:
    """`w1@8`, or `w1@8/16` for 16 requests."""

    workload: Workload
    concurrency: int
    num_requests: int | None = None  # None: what suits the workload

    def __str__(self) -> str:
        requests = f"/{self.num_requests}" if self.num_requests else ""
        return f"{self.workload.value}@{self.concurrency}{requests}"


def parse_loads(text: str) -> list[Load]:
    """Raises ValueError for what is no load, and for one given twice."""
    loads = [_parse_load(part) for part in text.split(",")]
    settings = [(load.workload, load.concurrency) for load in loads]
    if len({*settings}) < len(settings):
        raise ValueError(f"{text} names one workload and concurrency twice")
    return loads


def _parse_load(text: str) -> Load:
    match = re.fullmatch(r"(w[1-5])@([1-9]\d*)(?:/([1-9]\d*))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no load: w1@8, or w1@8/16 for 16 requests")
    workload = Workload(match[1])
    if match[3] and workload.is_window:
        raise ValueError(f"{text}: {workload.value} lasts some seconds, not some requests")
    return Load(workload, int(match[2]), int(match[3]) if match[3] else None)


@dataclass(frozen=True, slots=True)
class ComparePlan:
    loads: Sequence[Load]
    num_repeats: int
    seed: str
    num_warmup: int | None = None
    sizes: Sizes = field(default_factory=Sizes)
    window: Window = field(default_factory=Window)

    def plans(self, load: Load, repeat: int, side: str) -> list[Plan]:
        return Plan(
            workload=load.workload,
            concurrency=load.concurrency,
            seed=f"{self.seed}-{load}-{repeat}{side}",
            num_requests=load.num_requests,
            num_warmup=self.num_warmup,
            sizes=self.sizes,
            window=self.window,
        ).with_baseline()


async def compare(
    plan: ComparePlan, a: Target, b: Target, progress: Progress, pairs: list[Pair]
) -> None:
    """Adds to `pairs` as each is complete."""
    for repeat in range(1, plan.num_repeats + 1):
        for load in plan.loads:
            sides: list[list[Report]] = []
            for side, target in (("a", a), ("b", b)):
                progress.say(f"repeat {repeat} of {plan.num_repeats}, {load}, {target.address}")
                reports: list[Report] = []
                for one in plan.plans(load, repeat, side):
                    await run(one, target, progress, reports)
                sides.append(reports)
            pairs += [Pair(*reports) for reports in zip(*sides, strict=True)]
