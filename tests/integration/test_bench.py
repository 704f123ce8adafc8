"""`firsttoken bench` as a user runs it, against a real server; what it asks, counts and prints."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients import LoadReport
from tests.conftest import MakeTinyModel
from tests.serving import Served, load, serve, wait_idle


@pytest.fixture(scope="module")
def tiny(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serve(tiny_model_dir("llama"), tmp_path_factory.mktemp("bench"), "--num-threads=1") as s:
        yield s


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def figures(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def engine_load(served: Served) -> LoadReport:
    return asyncio.run(load(served))


@pytest.mark.parametrize("protocol", ["http", "ids", "text"])
def test_counts_are_the_engines_own(tiny: Served, tmp_path: Path, protocol: str) -> None:
    """Every token that the engine prefilled or generated is in the report, and no other."""
    where = ["--url", tiny.http] if protocol == "http" else ["--grpc", tiny.grpc]
    path = tmp_path / "figures.json"
    before = engine_load(tiny)
    answer = bench(
        *[*where, *(["--send-text"] if protocol == "text" else [])],
        *["--workload=w1", "--concurrency=3", "--requests=7", "--max-tokens=5", "--warmup=0"],
        *["--json", str(path)],
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    after = engine_load(tiny)
    document = figures(path)
    (report,) = document["reports"]
    assert document["is_complete"]
    assert (report["num_requests"], report["num_ok"], report["failures"]) == (7, 7, {})
    assert report["output_tokens"] == 35 == after.generated_tokens - before.generated_tokens
    prompt_tokens = report["prompt_tokens_mean"] * 7
    computed_tokens = prompt_tokens * (1 - report["cached_share"])
    assert computed_tokens == pytest.approx(after.prompt_tokens - before.prompt_tokens)
    assert report["itl_ms"]["count"] <= 7 * 4
    assert (report["ttft_ms"]["count"], report["tpot_ms"]["count"]) == (7, 7)
    assert report["e2e_ms"]["max"] / 1e3 < report["wall_seconds"]
    assert report["run"]["model"] == tiny.model
    assert "7 of 7 requests answered" in answer.stdout


def test_equal_seeds_ask_alike_over_both_protocols(tiny: Served, tmp_path: Path) -> None:
    """The second run finds the first one's prompts in the prefix cache."""
    shares = []
    for name, where in (("http", f"--url={tiny.http}"), ("grpc", f"--grpc={tiny.grpc}")):
        path = tmp_path / name
        arguments = ["--seed=same", "--requests=2", "--max-tokens=2", "--warmup=0"]
        assert bench(where, *arguments, f"--json={path}").returncode == 0
        shares.append(figures(path)["reports"][0]["cached_share"])
    assert shares[0] < 0.1
    assert shares[1] > 0.7


def test_the_shared_prefix_of_w2_is_seen_as_cached(tiny: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--workload=w2", "--prefix-tokens=300", "--requests=4", "--max-tokens=2"]
    answer = bench(f"--url={tiny.http}", *arguments, f"--json={path}")
    assert answer.returncode == 0
    assert figures(path)["reports"][0]["cached_share"] > 0.7


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_w4_answers_by_the_schema_over_the_chat_template(
    served: Served, tmp_path: Path, protocol: str
) -> None:
    """With the embedded model: a random one never comes to the end of a string."""
    path = tmp_path / "figures.json"
    where = f"--url={served.http}" if protocol == "http" else f"--grpc={served.grpc}"
    arguments = ["--workload=w4", "--concurrency=3", "--requests=6", "--max-tokens=200"]
    answer = bench(where, *arguments, "--seed=3", "--warmup=0", f"--json={path}")
    assert answer.returncode == 0
    (report,) = figures(path)["reports"]
    assert report["num_valid_of_stopped"] == report["finish_reasons"]["stop"] > 0
    assert report["prompt_tokens_mean"] > 40  # the template's own tokens are among them


def test_w5_shows_streams_alone_and_with_long_prompts(tiny: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    answer = bench(
        *[f"--url={tiny.http}", "--workload=w5", "--concurrency=2", f"--json={path}"],
        *["--duration=3", "--long-interval=0.5", "--long-prompt-tokens=1200"],
    )
    assert answer.returncode == 0
    base, short, long = figures(path)["reports"]
    assert [report["run"]["workload"] for report in (base, short, long)] == [
        "w5-base",
        "w5",
        "w5-long",
    ]
    assert (long["num_requests"], long["num_ok"] + long["num_cut_off"]) == (2, 2)
    assert base["wall_seconds"] >= 1.5
    assert short["wall_seconds"] >= 3
    assert base["cached_share"] < 0.1 > short["cached_share"]


def test_compare_takes_turns_and_gives_ratios(tiny: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    answer = bench(
        *["compare", tiny.http, f"grpc://{tiny.grpc}", "--repeats=2", f"--json={path}"],
        *["--workloads=w1@2/4,w3@1/2", "--prompt-tokens=30", "--max-tokens=4"],
    )
    assert answer.returncode == 0, answer.stderr
    turns = [line for line in answer.stderr.splitlines() if line.startswith("repeat ")]
    assert [line.rpartition(" ")[2] for line in turns] == [tiny.http, f"grpc://{tiny.grpc}"] * 4
    document = figures(path)
    assert len(document["pairs"]) == 4
    rows = {(row["workload"], row["metric"]): row for row in document["comparisons"]}
    row = rows["w1", "output tokens/s"]
    a, b = (
        [
            pair[side]["output_tokens_per_second"]
            for pair in document["pairs"]
            if pair[side]["run"]["workload"] == "w1"
        ]
        for side in ("a", "b")
    )
    ratios = [one / other for one, other in zip(a, b, strict=True)]
    assert (row["ratio_min"], row["ratio_max"]) == (min(ratios), max(ratios))
    assert row["num_pairs"] == 2
    assert answer.stdout.startswith(f"A {tiny.http}\nB grpc://{tiny.grpc}\n")


def test_sweep_finds_where_streams_stutter(tiny: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--end=2", "--requests=2", "--max-tokens=8", f"--json={path}"]
    wide = bench("sweep", f"--grpc={tiny.grpc}", "--itl-p99-ms=100000", *arguments)
    assert wide.returncode == 0
    assert "still at concurrency 2" in wide.stdout
    assert [r["run"]["concurrency"] for r in figures(path)["reports"]] == [1, 2]
    narrow = bench("sweep", f"--grpc={tiny.grpc}", "--itl-p99-ms=0.000001", *arguments)
    assert "not even at concurrency 1" in narrow.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_prints_what_it_saw_and_leaves_nothing_running(
    tiny: Served, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--concurrency=2", "--requests=3000", "--max-tokens=16", "--quiet"]
    command = [sys.executable, "-m", "clients", "bench", f"--url={tiny.http}", *arguments]
    process = subprocess.Popen(
        [*command, f"--json={path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    before = engine_load(tiny).generated_tokens
    while engine_load(tiny).generated_tokens < before + 200:
        assert process.poll() is None
    process.send_signal(number)
    output, errors = process.communicate(timeout=80)
    assert (process.returncode, errors) == (130, "")
    document = figures(path)
    (report,) = document["reports"]
    assert not document["is_complete"]
    assert report["num_ok"] > 5
    assert report["num_requests"] == report["num_ok"] + report["num_cut_off"] < 3000
    assert f"{report['num_cut_off']} cut off at the end" in output
    asyncio.run(wait_idle(tiny, 30))


def test_an_interrupted_comparison_keeps_its_complete_pairs(tiny: Served, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    loads = "--workloads=w1@1/1,w3@1/3000"
    command = [sys.executable, "-m", "clients", "bench", "compare", tiny.http, tiny.http, loads]
    process = subprocess.Popen(
        [*command, "--prompt-tokens=9", "--max-tokens=2", f"--json={path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "w3@1/3000" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=80)
    assert process.returncode == 130
    document = figures(path)
    assert [pair["a"]["run"]["workload"] for pair in document["pairs"]] == ["w1"]
    assert "w1@1" in output and "w3@1" not in output
