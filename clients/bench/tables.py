"""Reports as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from clients.bench.distribution import Distribution
from clients.bench.report import Report


def report_text(report: Report) -> str:
    run = report.run
    lines = [
        f"{run.workload}  concurrency {run.concurrency}  {run.model} at {run.address}"
        f"  seed {run.seed}",
        f"  {report.num_ok} of {report.num_requests} requests answered in"
        f" {report.wall_seconds:.2f} s{_cut_off(report)}",
        f"  output {report.output_tokens_per_second:.1f} tokens/s"
        f"   total {report.total_tokens_per_second:.1f} tokens/s"
        f"   {report.requests_per_second:.2f} requests/s",
    ]
    if report.num_ok:
        lines += [_tokens(report), *_latencies(report), _endings(report)]
    lines += [
        f"  failed: {failure.count} {name}, the first: {failure.example}"
        for name, failure in report.failures.items()
    ]
    lines.append(f"  load generator: {report.client_cpu_share:.1%} of a core")
    return "\n".join(lines)


def _cut_off(report: Report) -> str:
    return f", {report.num_cut_off} cut off at the end" if report.num_cut_off else ""


def _tokens(report: Report) -> str:
    if report.cached_share is None:
        cached = "cached: the server does not say"
    else:
        cached = f"{report.cached_share:.1%} of them cached"
    few, many = report.output_tokens_min, report.output_tokens_max
    return (
        f"  prompts of {report.prompt_tokens_mean:.1f} tokens on average, {cached};"
        f" answers of {few if few == many else f'{few} to {many}'}"
    )


def _latencies(report: Report) -> list[str]:
    rows = [["ms", "p50", "p90", "p95", "p99", "max", "mean", "count"]]
    for name, spread in (
        ("TTFT", report.ttft_ms),
        ("ITL", report.itl_ms),
        ("TPOT", report.tpot_ms),
        ("E2E", report.e2e_ms),
    ):
        if spread is not None:
            rows.append([name, *_milliseconds(spread), str(spread.count)])
    return [f"  {line}" for line in aligned(rows)]


def _milliseconds(spread: Distribution) -> list[str]:
    values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max, spread.mean)
    return [f"{value:.1f}" for value in values]


def _endings(report: Report) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.finish_reasons.items())
    if report.num_valid_of_stopped is None:
        return f"  ended by: {reasons}"
    num_stopped = report.finish_reasons.get("stop", 0)
    return (
        f"  ended by: {reasons}; of {num_stopped} stopped, {report.num_valid_of_stopped} are valid"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
