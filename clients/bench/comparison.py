"""How two servers compare over pairs of runs, and how far that varies.

A machine's speed drifts by more than most differences worth knowing. Runs that follow each other
share its mood, so a ratio is taken of each pair, A divided by B, and then the median of those.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from clients.bench.distribution import Distribution
from clients.bench.report import Report
from clients.bench.tables import aligned


@dataclass(frozen=True, slots=True)
class Pair:
    """Of one repeat and one kind of run."""

    a: Report
    b: Report


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one metric; ratios are A / B of each pair."""

    workload: str
    concurrency: int
    metric: str
    is_more_better: bool
    a_median: float
    b_median: float
    ratio_median: float
    ratio_min: float
    ratio_max: float
    num_pairs: int


def _percentile(
    pick: Callable[[Report], Distribution | None], value: Callable[[Distribution], float]
) -> Callable[[Report], float | None]:
    def metric(report: Report) -> float | None:
        spread = pick(report)
        return None if spread is None else value(spread)

    return metric


# Name, whether more is better, and the value of one report.
METRICS: Sequence[tuple[str, bool, Callable[[Report], float | None]]] = (
    ("output tokens/s", True, lambda report: report.output_tokens_per_second),
    ("total tokens/s", True, lambda report: report.total_tokens_per_second),
    ("TTFT p50 ms", False, _percentile(lambda report: report.ttft_ms, lambda d: d.p50)),
    ("TTFT p95 ms", False, _percentile(lambda report: report.ttft_ms, lambda d: d.p95)),
    ("ITL p50 ms", False, _percentile(lambda report: report.itl_ms, lambda d: d.p50)),
    ("ITL p99 ms", False, _percentile(lambda report: report.itl_ms, lambda d: d.p99)),
    ("TPOT p50 ms", False, _percentile(lambda report: report.tpot_ms, lambda d: d.p50)),
    ("E2E p50 ms", False, _percentile(lambda report: report.e2e_ms, lambda d: d.p50)),
)


def comparisons(pairs: Iterable[Pair]) -> list[Comparison]:
    """In the order of the pairs' first appearance. A metric without a value on both sides of any
    pair is left out."""
    groups: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.a.run.workload, pair.a.run.concurrency), []).append(pair)
    return [
        comparison
        for (workload, concurrency), group in groups.items()
        for name, is_more_better, metric in METRICS
        if (values := _values(group, metric))
        for comparison in (_comparison(workload, concurrency, name, is_more_better, values),)
    ]


def _values(
    pairs: Sequence[Pair], metric: Callable[[Report], float | None]
) -> list[tuple[float, float]]:
    values = ((metric(pair.a), metric(pair.b)) for pair in pairs)
    return [(a, b) for a, b in values if a and b]


def _comparison(
    workload: str,
    concurrency: int,
    metric: str,
    is_more_better: bool,
    values: Sequence[tuple[float, float]],
) -> Comparison:
    ratios = [a / b for a, b in values]
    return Comparison(
        workload=workload,
        concurrency=concurrency,
        metric=metric,
        is_more_better=is_more_better,
        a_median=statistics.median(a for a, _ in values),
        b_median=statistics.median(b for _, b in values),
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        num_pairs=len(values),
    )


# ---------------------------------------------------------------- text


def comparison_text(a: str, b: str, rows: Sequence[Comparison], pairs: Sequence[Pair]) -> str:
    table = [["load", "metric", "A", "B", "A / B", "min", "max", "pairs", "better"]]
    table += [
        [
            f"{row.workload}@{row.concurrency}",
            row.metric,
            f"{row.a_median:.1f}",
            f"{row.b_median:.1f}",
            f"{row.ratio_median:.2f}",
            f"{row.ratio_min:.2f}",
            f"{row.ratio_max:.2f}",
            str(row.num_pairs),
            "above 1" if row.is_more_better else "below 1",
        ]
        for row in rows
    ]
    head = [
        f"A {a}",
        f"B {b}",
        "Medians of the runs; A / B is the median of the pairs' ratios, beside their min and max.",
    ]
    return "\n".join([*head, *aligned(table), *_remarks(pairs)])


def _remarks(pairs: Sequence[Pair]) -> list[str]:
    """What no ratio shows: failures, and whether answers by a schema follow it."""
    remarks = []
    for side, reports in (
        ("A", [pair.a for pair in pairs]),
        ("B", [pair.b for pair in pairs]),
    ):
        if num_failed := sum(report.num_failed for report in reports):
            kinds = sorted({name for report in reports for name in report.failures})
            remarks.append(f"{side}: {num_failed} requests failed: {', '.join(kinds)}")
        checked = [report for report in reports if report.num_valid_of_stopped is not None]
        if checked:
            num_valid = sum(report.num_valid_of_stopped or 0 for report in checked)
            num_stopped = sum(report.finish_reasons.get("stop", 0) for report in checked)
            num_ok = sum(report.num_ok for report in checked)
            remarks.append(
                f"{side}: w4: of {num_ok} answers {num_stopped} ended with stop,"
                f" and {num_valid} of those are valid"
            )
    return remarks
