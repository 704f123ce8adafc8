"""`make bench-core`: its parts give figures, on sizes that take no time, and its page names all."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from engine_service import bench_core
from engine_service.bench_batch_invariant import BATCHES
from engine_service.bench_batch_invariant import measure as measure_batch_invariant
from engine_service.bench_step import KINDS
from engine_service.bench_step import measure as measure_step
from tests.conftest import MakeTinyModel


def test_blocks_and_preemptions_have_a_price() -> None:
    assert bench_core.measure_blocks(num_requests=30)["operations_per_second"] > 10_000
    preemption = bench_core.measure_preemption(num_requests=16)
    assert preemption["preemptions"] > 0
    assert preemption["tokens_again_each"] > 0


def test_the_flag_is_measured_in_prefill_and_decode(tiny_model_dir: MakeTinyModel) -> None:
    figures = measure_batch_invariant(tiny_model_dir("llama", num_hidden_layers=1), num_steps=1)
    steps = ["prefill", *(f"decode_{batch}" for batch in BATCHES)]
    assert list(figures) == [f"{n}_{s}_ms" for n in ("plain", "invariant") for s in steps]
    assert all(value > 0 for value in figures.values())


def test_a_step_has_a_price_by_part() -> None:
    figures = measure_step(num_requests=3, num_steps=30)
    parts = ("core", "input_batch", "sampler", "encode", "all")
    assert list(figures) == [f"{kind}_{part}_us" for kind in KINDS for part in parts]
    assert all(value > 0 for value in figures.values())


def test_the_table_and_the_json_have_every_figure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    embedded_model_dir: Path,
) -> None:
    figures = {"scheduler": {"a_us": 1.5}, "blocks": {"b": 2_000_000.0}}
    monkeypatch.setattr(bench_core, "measure_all", lambda model_dir: figures)
    path = tmp_path / "new" / "bench.json"
    monkeypatch.setattr(sys, "argv", ["bench_core", "--json", str(path)])
    bench_core.main()
    assert json.loads(path.read_text()) == figures
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["scheduler", "a_us"], ["blocks", "b"]]
    assert math.isclose(float(lines[1].split()[-1].replace(",", "")), 2_000_000)
