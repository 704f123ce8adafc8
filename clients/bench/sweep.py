"""How many streams a server carries before they stutter: concurrency rises until p99 ITL crosses
a bound, and then closes in on where it did.

    1, 2, 4, 8, 16, 32 (beyond it), 24, 28 (beyond it), 26: near enough
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clients.bench.progress import Progress
from clients.bench.report import Report
from clients.bench.run import Plan, run
from clients.bench.tables import aligned
from clients.bench.target import Target
from clients.bench.workloads import Sizes, Workload

_PRECISION = 8  # stops when the gap is at most this part of what the server carries


@dataclass(frozen=True, slots=True)
class SweepPlan:
    workload: Workload  # no window
    itl_p99_ms: float
    seed: str
    start: int = 1
    end: int = 256  # no higher concurrency is tried
    num_requests: int | None = None  # of each run; None: what suits workload and concurrency
    num_warmup: int | None = None
    sizes: Sizes = field(default_factory=Sizes)

    def plan(self, concurrency: int) -> Plan:
        suitable = max(self.workload.num_requests(concurrency), 2 * concurrency)
        return Plan(
            workload=self.workload,
            concurrency=concurrency,
            seed=f"{self.seed}-{concurrency}",
            num_requests=self.num_requests or suitable,
            num_warmup=self.num_warmup,
            sizes=self.sizes,
        )

    def is_within(self, report: Report) -> bool:
        """A server that refuses some requests does not carry them, however smooth the rest."""
        spread = report.itl_ms
        return report.num_failed == 0 and spread is not None and spread.p99 <= self.itl_p99_ms


async def sweep(plan: SweepPlan, target: Target, progress: Progress, reports: list[Report]) -> None:
    """Adds to `reports` in the order of the runs."""
    within: dict[int, bool] = {}
    while (concurrency := next_concurrency(within, plan.start, plan.end)) is not None:
        await run(plan.plan(concurrency), target, progress, reports)
        within[concurrency] = plan.is_within(reports[-1])
        progress.say(
            f"concurrency {concurrency}: {'within' if within[concurrency] else 'beyond'} the bound"
        )


def next_concurrency(within: Mapping[int, bool], start: int, end: int) -> int | None:
    """What to try after what was tried; None when nothing more is to be learnt."""
    if not within:
        return start
    too_many = min((tried for tried, is_within in within.items() if not is_within), default=None)
    if too_many is None:
        highest = max(within)
        return None if highest >= end else min(2 * highest, end)
    carried = carried_concurrency(within)
    if carried is None or too_many - carried <= max(1, carried // _PRECISION):
        return None
    return (carried + too_many) // 2


def carried_concurrency(within: Mapping[int, bool]) -> int | None:
    """The highest that was within the bound and below every one that was not; None: not even
    the lowest was."""
    too_many = min((tried for tried, is_within in within.items() if not is_within), default=None)
    carried = (tried for tried in within if too_many is None or tried < too_many)
    return max(carried, default=None)


_COLUMNS = (
    "concurrency",
    "output tokens/s",
    "ITL p50 ms",
    "p99 ms",
    "TTFT p50 ms",
    "p99 ms",
    "failed",
    "bound",
)


def sweep_text(plan: SweepPlan, reports: Sequence[Report]) -> str:
    rows = [[*_COLUMNS]]
    for report in sorted(reports, key=lambda report: report.run.concurrency):
        latencies = [
            "-" if spread is None else f"{value:.1f}"
            for spread in (report.itl_ms, report.ttft_ms)
            for value in ((0.0, 0.0) if spread is None else (spread.p50, spread.p99))
        ]
        rows.append(
            [
                str(report.run.concurrency),
                f"{report.output_tokens_per_second:.1f}",
                *latencies,
                str(report.num_failed),
                "within" if plan.is_within(report) else "beyond",
            ]
        )
    return "\n".join([*aligned(rows), _verdict(plan, reports)])


def _verdict(plan: SweepPlan, reports: Sequence[Report]) -> str:
    within = {report.run.concurrency: plan.is_within(report) for report in reports}
    bound = f"ITL p99 at most {plan.itl_p99_ms:g} ms"
    carried = carried_concurrency(within)
    if not reports:
        return f"{bound}: nothing was measured"
    if carried is None:
        return f"{bound}: not even at concurrency {plan.start}"
    if all(within.values()):
        return f"{bound}: still at concurrency {carried}, the highest that was tried"
    return f"{bound}: up to concurrency {carried}"
