"""What streaming costs: the bench runs, on a load that takes no time, through every process."""

from __future__ import annotations

from engine_service.bench_stream import measure


def test_both_processes_have_a_price() -> None:
    figures = measure(num_streams=(2,), num_tokens=3, num_runs=1)
    assert list(figures) == ["engine_2_ms", "facade_2_ms"]
    assert all(value >= 0 for value in figures.values())
    assert sum(figures.values()) > 0
