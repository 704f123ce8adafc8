"""The bench of what a token costs on its way to a client runs, and knows every kind of answer."""

from __future__ import annotations

from pathlib import Path

from http_facade.bench_output import measure


def test_every_kind_of_answer_has_its_cost(embedded_model_dir: Path) -> None:
    figures = measure(embedded_model_dir)
    kinds = ("plain", "stop_strings", "reasoning", "tools", "logprobs")
    assert list(figures) == [f"{kind}_us" for kind in kinds]
    assert all(0 < microseconds < 10_000 for microseconds in figures.values())
