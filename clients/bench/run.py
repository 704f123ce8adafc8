"""One run: prompts made, server warmed up, load sent, answers summed up to a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from clients.bench.answer import Answer
from clients.bench.load import closed_loop, windowed_loop
from clients.bench.progress import Progress
from clients.bench.report import Clock, Report, RunInfo, report_of
from clients.bench.target import Call, Target
from clients.bench.workloads import (
    FIRST_INDEX,
    PROMPT_KINDS,
    PromptKind,
    PromptSource,
    Sizes,
    Window,
    Workload,
)


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    concurrency: int
    seed: str
    num_requests: int | None = None  # None: what suits the workload
    num_warmup: int | None = None  # None: as the workload has it
    sizes: Sizes = field(default_factory=Sizes)
    window: Window = field(default_factory=Window)  # of w5

    @property
    def title(self) -> str:
        return f"{self.workload.value} at concurrency {self.concurrency}"

    def with_baseline(self) -> list[Self]:
        """w5 is preceded by the same streams left alone. Their seed is another, or they would
        find each other's prompts in the prefix cache."""
        if self.workload is not Workload.W5:
            return [self]
        baseline = replace(
            self,
            workload=Workload.W5_BASE,
            seed=f"{self.seed}-base",
            window=self.window.baseline(),
        )
        return [baseline, self]


async def run(plan: Plan, target: Target, progress: Progress, reports: list[Report]) -> None:
    """Adds to `reports`, also when it is cancelled: then of what was seen by that time."""
    source = PromptSource(plan.seed, plan.concurrency, plan.sizes)
    await _warm_up(plan, source, target, progress)
    if plan.workload.is_window:
        await _run_window(plan, source, target, progress, reports)
    else:
        await _run_requests(plan, source, target, progress, reports)
    if reports[-1].has_heavy_client:
        progress.say(
            f"warning: the load generator took {reports[-1].client_cpu_share:.0%} of a core; a"
            " server on the same machine was slowed down by it"
        )


async def _warm_up(plan: Plan, source: PromptSource, target: Target, progress: Progress) -> None:
    """One request at a time."""
    num_warmup = plan.workload.num_warmup if plan.num_warmup is None else plan.num_warmup
    kind = PROMPT_KINDS[plan.workload]
    for index in range(FIRST_INDEX - 1, FIRST_INDEX - 1 - num_warmup, -1):
        answer = Answer()
        await target.prepare(source.prompt(kind, index))(answer)
        if answer.failure is not None:
            progress.say(f"warm-up: {answer.failure.name}: {answer.failure.message}")


async def _run_requests(
    plan: Plan, source: PromptSource, target: Target, progress: Progress, reports: list[Report]
) -> None:
    num_requests = plan.num_requests or plan.workload.num_requests(plan.concurrency)
    indices = range(FIRST_INDEX, FIRST_INDEX + num_requests)
    calls = _prepared(source, PROMPT_KINDS[plan.workload], indices, target)
    answers: list[Answer] = []
    stopwatch = _Stopwatch()
    try:
        async with progress.shown(plan.title, answers, num_requests):
            await closed_loop(calls, plan.concurrency, answers)
    finally:
        clock = stopwatch.read()
        _cut_off(answers)
        info = _info(plan, target, plan.workload.value)
        reports.append(report_of(info, answers, clock))


async def _run_window(
    plan: Plan, source: PromptSource, target: Target, progress: Progress, reports: list[Report]
) -> None:
    def make_call(number: int) -> Call:
        return target.prepare(source.prompt(PromptKind.W1, FIRST_INDEX + number))

    indices = range(FIRST_INDEX, FIRST_INDEX + plan.window.num_long)
    long_calls = _prepared(source, PromptKind.LONG, indices, target)
    answers: list[Answer] = []
    long_answers: list[Answer] = []
    stopwatch = _Stopwatch()
    try:
        async with progress.shown(plan.title, answers, num_requests=0):
            await windowed_loop(
                make_call, long_calls, plan.concurrency, plan.window, answers, long_answers
            )
    finally:
        clock = stopwatch.read()
        _cut_off((*answers, *long_answers))
        info = _info(plan, target, plan.workload.value)
        reports.append(report_of(info, answers, clock))
        if long_calls:
            long_info = _info(plan, target, f"{Workload.W5.value}-long")
            reports.append(report_of(long_info, long_answers, clock))


def _prepared(
    source: PromptSource, kind: PromptKind, indices: Sequence[int], target: Target
) -> list[Call]:
    return [target.prepare(source.prompt(kind, index)) for index in indices]


def _cut_off(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.ended_seconds is None:
            answer.cut_off()


def _info(plan: Plan, target: Target, workload: str) -> RunInfo:
    return RunInfo(workload, plan.concurrency, plan.seed, target.address, target.model)


class _Stopwatch:
    def __init__(self) -> None:
        self._wall_seconds = time.perf_counter()
        self._cpu_seconds = time.process_time()

    def read(self) -> Clock:
        return Clock(
            time.perf_counter() - self._wall_seconds, time.process_time() - self._cpu_seconds
        )
