"""`bench compare` and `bench sweep` without a server: ratios, loads, and what to try next."""

from __future__ import annotations

import pytest

from clients.bench.answer import Answer, Failure, FailureKind, TokenUsage
from clients.bench.compare import DEFAULT_LOADS, ComparePlan, Load, parse_loads
from clients.bench.comparison import Comparison, Pair, comparison_text, comparisons
from clients.bench.report import Clock, Report, RunInfo, report_of
from clients.bench.sweep import SweepPlan, carried_concurrency, next_concurrency, sweep_text
from clients.bench.workloads import Workload

# ---------------------------------------------------------------- compare


def report(gap: float, workload: str = "w1", *, concurrency: int = 8, failed: int = 0) -> Report:
    """Of one answer of three chunks, `gap` seconds apart and from its sending, in that time."""
    answer = Answer(0.0, [gap, 2 * gap, 3 * gap], 3 * gap, ["{}"], TokenUsage(7, 3), "stop")
    failures = [Answer(failure=Failure(FailureKind.TIMEOUT, "late")) for _ in range(failed)]
    run = RunInfo(workload, concurrency, "7", "http://x", "m")
    return report_of(run, [answer, *failures], Clock(3 * gap, 0.0))


def by_metric(pairs: list[Pair]) -> dict[str, Comparison]:
    return {row.metric: row for row in comparisons(pairs)}


def test_ratios_are_of_the_pairs_and_their_median_is_told() -> None:
    """The machine gets slower from pair to pair; A stays twice as quick within two of them."""
    gaps = [(0.1, 0.2), (0.2, 0.4), (0.4, 0.4)]
    rows = by_metric([Pair(report(a), report(b)) for a, b in gaps])
    itl = rows["ITL p50 ms"]
    assert [itl.a_median, itl.b_median] == pytest.approx([200, 400])
    assert (itl.ratio_min, itl.ratio_median, itl.ratio_max) == pytest.approx((0.5, 0.5, 1.0))
    assert (itl.is_more_better, itl.num_pairs) == (False, 3)
    output = rows["output tokens/s"]
    assert (output.ratio_min, output.ratio_median, output.ratio_max) == pytest.approx((1, 2, 2))
    assert output.is_more_better


def test_loads_are_kept_apart_in_their_order() -> None:
    pairs = [
        Pair(report(0.1, workload, concurrency=concurrency), report(0.1))
        for workload, concurrency in (("w3", 4), ("w1", 8), ("w3", 4), ("w1", 1))
    ]
    rows = comparisons(pairs)
    assert list(dict.fromkeys((row.workload, row.concurrency) for row in rows)) == [
        ("w3", 4),
        ("w1", 8),
        ("w1", 1),
    ]
    assert {row.num_pairs for row in rows if row.workload == "w3"} == {2}


def test_a_pair_without_a_value_on_one_side_is_left_out() -> None:
    run = RunInfo("w1", 8, "7", "http://x", "m")
    nothing = report_of(run, [Answer(failure=Failure(FailureKind.TIMEOUT, "late"))], Clock(1, 0))
    rows = by_metric([Pair(report(0.1), nothing), Pair(report(0.1), report(0.2))])
    assert {row.num_pairs for row in rows.values()} == {1}
    assert comparisons([Pair(report(0.1), nothing)]) == []


def test_the_table_says_which_way_it_divides_and_what_ratios_hide() -> None:
    pairs = [Pair(report(0.1, "w4"), report(0.2, "w4", failed=2))]
    text = comparison_text("http://a", "http://b", comparisons(pairs), pairs)
    assert text.startswith("A http://a\nB http://b\n")
    (line,) = [line for line in text.splitlines() if "output tokens/s" in line]
    assert " ".join(line.split()) == "w4@8 output tokens/s 10.0 5.0 2.00 2.00 2.00 1 above 1"
    assert "B: 2 requests failed: timeout" in text
    assert "A: w4: of 1 answers 1 ended with stop, and 0 of those are valid" in text


def test_loads_are_read_as_they_are_written() -> None:
    loads = parse_loads("w1@8, w2@8/16,w5@4")
    assert loads == [
        Load(Workload.W1, 8),
        Load(Workload.W2, 8, 16),
        Load(Workload.W5, 4),
    ]
    assert ",".join(map(str, parse_loads(DEFAULT_LOADS))) == DEFAULT_LOADS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("w1", "no load"),
        ("w1@0", "no load"),
        ("w6@1", "no load"),
        ("w1@8/0", "no load"),
        ("w1@8,", "no load"),
        ("", "no load"),
        ("w5@4/8", "not some requests"),
        ("w1@8,w1@8/16", "twice"),
    ],
)
def test_what_is_no_load_is_said(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_loads(text)


def test_no_two_runs_of_a_comparison_share_prompts() -> None:
    plan = ComparePlan(parse_loads("w1@1,w2@8,w2@4,w5@4"), num_repeats=2, seed="7")
    seeds = [
        run.seed
        for repeat in (1, 2)
        for load in plan.loads
        for side in ("a", "b")
        for run in plan.plans(load, repeat, side)
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 5


# ---------------------------------------------------------------- sweep


@pytest.mark.parametrize(
    ("capacity", "tried", "carried"),
    [
        (0, [1], None),
        (1, [1, 2], 1),
        (5, [1, 2, 4, 8, 6, 5], 5),
        (26, [1, 2, 4, 8, 16, 32, 24, 28, 26], 26),
        (64, [1, 2, 4, 8, 16, 32, 64], 64),
        (1000, [1, 2, 4, 8, 16, 32, 64], 64),
    ],
)
def test_a_sweep_doubles_then_closes_in(
    capacity: int, tried: list[int], carried: int | None
) -> None:
    within: dict[int, bool] = {}
    while (concurrency := next_concurrency(within, 1, 64)) is not None:
        assert concurrency not in within
        within[concurrency] = concurrency <= capacity
    assert list(within) == tried
    assert carried_concurrency(within) == carried


def test_a_sweep_stays_between_its_ends() -> None:
    within: dict[int, bool] = {}
    while (concurrency := next_concurrency(within, 3, 20)) is not None:
        within[concurrency] = True
    assert list(within) == [3, 6, 12, 20]


def test_a_run_with_failures_is_beyond_the_bound() -> None:
    plan = SweepPlan(Workload.W1, itl_p99_ms=150, seed="7")
    assert plan.is_within(report(0.1))
    assert not plan.is_within(report(0.2))
    assert not plan.is_within(report(0.1, failed=1))


def test_every_stream_of_a_sweep_has_its_turn() -> None:
    plan = SweepPlan(Workload.W3, itl_p99_ms=1, seed="7")
    assert plan.plan(4).num_requests == 8
    assert plan.plan(32).num_requests == 64
    assert SweepPlan(Workload.W3, 1, "7", num_requests=5).plan(32).num_requests == 5
    assert plan.plan(4).seed != plan.plan(8).seed


@pytest.mark.parametrize(
    ("gaps", "says"),
    [
        ({1: 0.2}, "not even at concurrency 1"),
        ({1: 0.1, 2: 0.2}, "up to concurrency 1"),
        ({1: 0.1, 2: 0.1}, "still at concurrency 2, the highest that was tried"),
    ],
)
def test_the_verdict_of_a_sweep(gaps: dict[int, float], says: str) -> None:
    plan = SweepPlan(Workload.W1, itl_p99_ms=150, seed="7", end=2)
    reports = [report(gap, concurrency=concurrency) for concurrency, gap in gaps.items()]
    lines = sweep_text(plan, reports).splitlines()
    assert lines[-1] == f"ITL p99 at most 150 ms: {says}"
    assert [line.split()[0] for line in lines[1:-1]] == list(map(str, gaps))
    assert sweep_text(plan, []).endswith("nothing was measured")
