"""The arithmetic of `firsttoken bench`, by events at made-up times."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest

from clients.bench.answer import Answer, Failure, FailureKind, TokenUsage
from clients.bench.distribution import Distribution, percentile
from clients.bench.person import is_valid_person
from clients.bench.report import Clock, Report, RunInfo, report_of
from clients.bench.tables import report_text

approx = pytest.approx


def answered(
    chunks: Sequence[float],
    *,
    sent: float = 0.0,
    end: float | None = None,
    tokens: int | None = None,
    prompt: int = 10,
    cached: int | None = None,
    text: str = "",
    reason: str = "length",
) -> Answer:
    """As many tokens as chunks, and an end with the last chunk, unless they are given."""
    return Answer(
        sent_seconds=sent,
        chunk_seconds=list(chunks),
        ended_seconds=chunks[-1] if end is None else end,
        texts=[text],
        usage=TokenUsage(prompt, len(chunks) if tokens is None else tokens, cached),
        finish_reason=reason,
    )


def failed(kind: FailureKind, message: str = "why", status: str = "") -> Answer:
    return Answer(ended_seconds=1.0, failure=Failure(kind, message, status))


def report(answers: Sequence[Answer], workload: str = "w1", wall: float = 2.0) -> Report:
    return report_of(RunInfo(workload, 2, "7", "http://x", "m"), answers, Clock(wall, 0.1))


# ---------------------------------------------------------------- one answer


def test_the_times_of_one_answer() -> None:
    answer = answered([1.5, 1.75, 2.5], sent=1.0, end=3.0)
    assert answer.ttft_seconds == 0.5
    assert answer.itl_seconds() == [0.25, 0.75]
    assert answer.e2e_seconds == 2.0
    assert answer.tpot_seconds == (2.0 - 0.5) / (3 - 1)


def test_several_tokens_in_a_chunk_change_tpot_and_not_itl() -> None:
    answer = answered([1.0, 2.0], end=2.0, tokens=11)
    assert answer.itl_seconds() == [1.0]
    assert answer.tpot_seconds == approx((2.0 - 1.0) / 10)


def test_a_single_token_has_no_tpot() -> None:
    assert answered([1.0], end=2.0).tpot_seconds is None
    assert answered([1.0], end=2.0).itl_seconds() == []


def test_a_cut_off_answer_shows_the_stall_that_was_open() -> None:
    answer = Answer(sent_seconds=0.0, chunk_seconds=[1.0, 2.0])
    answer.cut_off()
    assert answer.is_cut_off and not answer.is_ok
    assert answer.ended_seconds is not None
    assert answer.itl_seconds() == [1.0, answer.ended_seconds - 2.0]


# ---------------------------------------------------------------- percentiles


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1, 2, 3, 4, 5], p) for p in (0, 50, 90, 100)] == [1, 3, approx(4.6), 5]
    assert percentile([7], 99) == 7
    spread = Distribution.of(range(100, -1, -1))
    assert spread == Distribution(50, 90, 95, 99, 100, 50, 101)


def test_no_values_have_no_percentiles() -> None:
    assert Distribution.of([]) is None


# ---------------------------------------------------------------- a run


def test_rates_are_of_usage_and_wall_time() -> None:
    summed = report(
        [answered([1.0, 1.5], tokens=6, prompt=20), answered([1.0], tokens=4, prompt=30)], wall=4.0
    )
    assert (summed.output_tokens, summed.output_tokens_per_second) == (10, 2.5)
    assert summed.total_tokens_per_second == 60 / 4
    assert (summed.requests_per_second, summed.chunks_per_second) == (0.5, 0.75)
    assert (summed.prompt_tokens_mean, summed.output_tokens_min, summed.output_tokens_max) == (
        25,
        4,
        6,
    )
    assert (summed.client_cpu_seconds, summed.client_cpu_share) == (0.1, 0.025)


def test_latencies_are_in_milliseconds_over_all_answers() -> None:
    summed = report([answered([1.0, 1.2, 1.6], end=1.7), answered([2.0, 2.3], end=2.4)])
    assert summed.ttft_ms is not None and summed.ttft_ms.p50 == approx(1500)
    assert summed.itl_ms is not None and summed.itl_ms.count == 3
    assert [summed.itl_ms.p50, summed.itl_ms.max] == approx([300, 400])
    assert summed.tpot_ms is not None and summed.tpot_ms.max == approx(400)
    assert summed.e2e_ms is not None and summed.e2e_ms.mean == approx(2050)


def test_the_cached_share_is_of_prompts_whose_server_says_it() -> None:
    answers = [answered([1.0], prompt=30, cached=16), answered([1.0], prompt=10, cached=0)]
    assert report(answers).cached_share == 0.4
    assert report([*answers, answered([1.0], prompt=1000)]).cached_share == 0.4
    assert report([answered([1.0])]).cached_share is None


def test_failures_are_counted_by_kind_and_stay_out_of_the_figures() -> None:
    broken = answered([0.1, 5.0])
    broken.failure = Failure(FailureKind.NO_DONE, "cut")
    summed = report(
        [
            answered([1.0, 2.0]),
            broken,
            failed(FailureKind.REFUSED, "full", "http_429"),
            failed(FailureKind.REFUSED, "full again", "http_429"),
        ]
    )
    assert (summed.num_requests, summed.num_ok, summed.num_failed) == (4, 1, 3)
    assert {name: f.count for name, f in summed.failures.items()} == {"no_done": 1, "http_429": 2}
    assert summed.failures["http_429"].example == "full"
    assert summed.itl_ms is not None and summed.itl_ms.max == 1000
    assert summed.output_tokens == 2


def test_nothing_answered_is_no_division_by_zero() -> None:
    summed = report([failed(FailureKind.UNREACHABLE)], wall=0.0)
    assert (summed.ttft_ms, summed.prompt_tokens_mean, summed.output_tokens_min) == (None,) * 3
    assert summed.output_tokens_per_second == 0
    assert "0 of 1 requests answered" in report_text(summed)
    assert "failed: 1 unreachable, the first: why" in report_text(summed)


def test_a_window_counts_the_stalls_of_what_it_cuts_off_and_no_failure() -> None:
    cut = Answer(sent_seconds=0.0, chunk_seconds=[1.0, 9.0])
    cut.cut_off()
    for workload, count in (("w5", 3), ("w5-base", 3), ("w1", 1)):
        summed = report([answered([1.0, 2.0]), cut], workload)
        assert summed.itl_ms is not None and summed.itl_ms.count == count
        assert (summed.num_cut_off, summed.num_failed, summed.num_ok) == (1, 0, 1)
        assert summed.output_tokens == 2


def test_answers_by_the_schema_are_checked_where_they_stopped() -> None:
    valid = '{"name": "A", "age": 3, "tags": []}'
    answers = [
        answered([1.0], text=valid, reason="stop"),
        answered([1.0], text=valid[:9], reason="stop"),
        answered([1.0], text=valid[:9], reason="length"),
    ]
    summed = report(answers, "w4")
    assert summed.finish_reasons == {"stop": 2, "length": 1}
    assert summed.num_valid_of_stopped == 1
    assert "of 2 stopped, 1 are valid" in report_text(summed)
    assert report(answers, "w1").num_valid_of_stopped is None


@pytest.mark.parametrize(("wall", "is_heavy"), [(0.9, False), (1.0, True), (2.0, False)])
def test_a_heavy_client_is_told_where_it_can_be_judged(wall: float, is_heavy: bool) -> None:
    """0.1 s of CPU time, and a bit, in a run too short, one that shows it, and a longer one."""
    clock = Clock(wall, 0.11)
    run = RunInfo("w1", 2, "7", "http://x", "m")
    assert report_of(run, [answered([1.0])], clock).has_heavy_client is is_heavy


def test_a_report_becomes_json_under_the_names_of_its_fields() -> None:
    document = json.loads(msgspec.json.encode(report([answered([1.0, 2.0], cached=5)])))
    assert document["run"]["workload"] == "w1"
    assert document["itl_ms"]["p99"] == 1000
    assert document["cached_share"] == 0.5
    assert document["failures"] == {}


# ---------------------------------------------------------------- the schema of w4


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"name": "A", "age": 3, "tags": ["x", "y", "z"]}', True),
        (' {"tags": [], "age": -3, "name": ""}\n', True),
        ('{"name": "A", "age": 3.0, "tags": []}', True),
        ('{"name": "A", "age": 3.5, "tags": []}', False),
        ('{"name": "A", "age": true, "tags": []}', False),
        ('{"name": "A", "age": "3", "tags": []}', False),
        ('{"name": null, "age": 3, "tags": []}', False),
        ('{"name": "A", "age": 3, "tags": [1]}', False),
        ('{"name": "A", "age": 3, "tags": ["a", "b", "c", "d"]}', False),
        ('{"name": "A", "age": 3, "tags": {}}', False),
        ('{"name": "A", "age": 3}', False),
        ('{"name": "A", "age": 3, "tags": [], "more": 1}', False),
        ('[{"name": "A", "age": 3, "tags": []}]', False),
        ('{"name": "A", "age": 3, "tags": []} and more', False),
        ('{"name": "A", "a', False),
        ("", False),
    ],
)
def test_a_person_is_checked_to_the_letter(text: str, is_valid: bool) -> None:
    assert is_valid_person(text) is is_valid
