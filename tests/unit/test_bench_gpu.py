"""What `make bench-gpu` measures, as far as it can be tried without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_service.bench_gpu import PartRunner
from engine_service.bench_gpu_attention import AttentionStep, Heads, Share
from engine_service.bench_gpu_checks import Sizes as CheckSizes
from engine_service.bench_gpu_checks import items as check_items
from engine_service.bench_gpu_engine import EngineBench, Load, Sizes
from engine_service.bench_gpu_errors import relative_error, share_that_differs, within
from engine_service.bench_gpu_items import CheckFailed, Item
from engine_service.bench_gpu_part import measure
from engine_service.bench_gpu_report import Report
from engine_service.bench_gpu_shapes import LLAMA_1B, LLAMA_8B, ModelShape
from engine_service.bench_gpu_transformers import TransformersBench
from kernels.reference.attention import paged_attention
from tests.pretend_gpu import PretendGpu

TINY = ModelShape(
    name="tiny",
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=200,
    tie_word_embeddings=True,
    max_model_len=256,
    dtype="float32",
)
LOAD = Load(num_requests=2, num_prompt_tokens=6, num_output_tokens=5)


class SmallGpu(PretendGpu):
    max_num_seqs = 2
    max_num_batched_tokens = 16


# ---------------------------------------------------------------- arithmetic


def test_weights_and_kv_numbers_are_those_of_the_models() -> None:
    """As published: 1.24 and 8.03 thousand million parameters, norms (a few thousand) aside."""
    assert LLAMA_1B.stored_weights == pytest.approx(1.2358e9, rel=1e-3)
    assert LLAMA_8B.stored_weights == pytest.approx(8.0303e9, rel=1e-3)
    assert LLAMA_1B.kv_numbers * 2 == 32_768  # bytes of a token in BF16
    assert LLAMA_8B.kv_numbers * 2 == 131_072


def test_operations_and_bytes_of_a_step() -> None:
    layer = 32 * (4 + 2 + 2) * 8 + 32 * 4 * 8 + 3 * 32 * 64
    head = 200 * 32
    assert TINY.linear_operations(num_tokens=7, num_logit_rows=2) == 2 * (7 * layer + 2 * head)
    assert TINY.attention_operations(3) == 4 * 4 * 8 * (1 + 2 + 3)
    assert TINY.decode_bytes(10, weight_bytes=4, kv_bytes=2) == 4 * (layer + head) + 10 * 32 * 2


def test_operations_of_attention_are_those_of_what_is_seen() -> None:
    step = AttentionStep.random(
        [Share(5, 2), Share(3)], Heads(4, 2, 8), torch.float32, torch.device("cpu")
    )
    assert step.operations == 4 * 4 * 8 * (4 + 5 + 3)
    assert step.kv_bytes == (5 + 3) * 2 * 2 * 8 * 4


def test_a_nan_is_no_small_error() -> None:
    assert within(0.5, [0.1, 0.5]) == {"error": 0.5, "bound": 0.5}
    for error in (0.51, float("nan"), float("inf")):
        for errors in ([error, 0.1], [0.1, error]):
            with pytest.raises(CheckFailed):
                within(0.5, errors)


def test_errors() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert np.isnan(relative_error(torch.tensor([3.0, torch.nan]), exact))
    assert share_that_differs(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 0.5


def test_steps_of_attention_keep_their_meaning() -> None:
    shares = (Share(40, 7), Share(17), Share(5, 5))
    step = AttentionStep.random(shares, Heads(4, 2, 8), torch.float32, torch.device("cpu"))
    whole = step.attend(paged_attention)
    assert relative_error(whole, step.exact()) < 1e-6
    for request, rows in enumerate(torch.split(whole, [7, 1, 5])):
        alone = step.alone(request)
        assert relative_error(alone.attend(paged_attention), rows) < 1e-6
        assert relative_error(alone.last_query().attend(paged_attention), rows[-1:]) < 1e-6
    filled = step.filled(2).attend(paged_attention)
    assert relative_error(filled[:13], whole) < 1e-6
    assert filled[13:].isnan().all()


# ---------------------------------------------------------------- the report


def test_the_report_is_whole_after_every_item(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    report = Report(path)
    report.add("kernels", "norm", {"us": 2.0, "gb_s": 1000.0})
    assert json.loads(path.read_text())["parts"] == {
        "kernels": {"norm": report.parts["kernels"]["norm"]}
    }
    report.add("limits", "copy", {"gb_s": 4000.0})
    report.add("limits", "matmul", {"tflop_s": 800.0})
    report.add("engine-1b", str(LOAD), {"output_tokens_s": 300.0, "tflop_s": 200.0})
    report.add("transformers-1b", str(LOAD), {"output_tokens_s": 100.0})
    report.fail("checks", "fp8", "CheckFailed: an error")
    content = json.loads(path.read_text())
    assert content["parts"]["kernels"]["norm"] == {"us": 2.0, "gb_s": 1000.0, "of_copy": 0.25}
    assert content["parts"]["limits"]["copy"] == {"gb_s": 4000.0}
    assert content["parts"]["engine-1b"][str(LOAD)] == {
        "output_tokens_s": 300.0,
        "tflop_s": 200.0,
        "of_matmul": 0.25,
        "of_transformers": 3.0,
    }
    assert content["failures"] == {"checks": {"fp8": "CheckFailed: an error"}}
    table = report.table()
    assert "of_transformers 3" in table
    assert "checks: failed" in table


# ---------------------------------------------------------------- parts as processes

_PART = """
import json, os, sys, time
items = ["good", "bad", "deadly", "slow", "last"]
print(json.dumps({"device": {"name": "none"}, "items": items}), flush=True)
for item in items:
    if item in json.loads(sys.argv[sys.argv.index("--skip") + 1]):
        continue
    print(json.dumps({"item": item}), flush=True)
    if item == "bad":
        print(json.dumps({"item": item, "failure": "ValueError: no"}), flush=True)
        continue
    if item == "deadly":
        os.abort()
    if item == "slow":
        time.sleep(60)
    print(json.dumps({"item": item, "figures": {"us": 1.0}}), flush=True)
"""


def test_what_dies_or_hangs_spoils_no_other_item(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    runner = PartRunner(report, total_seconds=60.0, item_seconds=4.0)
    runner.run("checks", [sys.executable, "-c", _PART], seconds=60.0)
    assert set(report.parts["checks"]) == {"good", "last"}
    assert report.failures["checks"] == {
        "bad": "ValueError: no",
        "deadly": "the process ended with status -6",
        "slow": "it took too long",
    }


_SHARE = """
import json, sys, time
share, num_shares = map(int, sys.argv[sys.argv.index("--share") + 1].split("/"))
items = ["a", "b", "c", "d", "e"][share::num_shares]
print(json.dumps({"device": {"name": "none"}, "items": items}), flush=True)
for item in items:
    if item not in json.loads(sys.argv[sys.argv.index("--skip") + 1]):
        print(json.dumps({"item": item}), flush=True)
        if item == "b":
            sys.exit(3)
        print(json.dumps({"item": item, "figures": {"us": 1.0}}), flush=True)
"""


def test_shares_of_a_part_run_side_by_side(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    PartRunner(report, 60.0, 30.0).run("checks", [sys.executable, "-c", _SHARE], 60.0, 3)
    assert set(report.parts["checks"]) == {"a", "c", "d", "e"}
    assert report.failures == {"checks": {"b": "the process ended with status 3"}}
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == report.parts


def test_what_is_not_reached_in_time_is_told(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    runner = PartRunner(report, total_seconds=30.0, item_seconds=30.0)
    runner.run("checks", [sys.executable, "-c", _PART], seconds=1.5)
    assert report.failures["checks"]["slow"] == "no time was left"
    assert report.failures["checks"]["last"] == "no time was left"


def test_a_part_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    PartRunner(report, 30.0, 30.0).run("checks", [sys.executable, "-c", "exit(3)"], 30.0)
    assert report.failures == {"checks": {"its start": "the process ended with status 3"}}


def test_events_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, float]:
        raise CheckFailed("an error\nand more")

    events: list[object] = []
    items = [Item("a", fail), Item("b", lambda: {"us": 1.0}), Item("c", fail)]
    measure(items, {"c"}, events.append)
    assert events == [
        {"item": "a"},
        {"item": "a", "failure": "CheckFailed: an error"},
        {"item": "b"},
        {"item": "b", "figures": {"us": 1.0}},
    ]
    assert "and more" in capsys.readouterr().err


def test_it_needs_no_more_than_the_machine_has() -> None:
    """Beside torch and triton: msgspec, numpy, safetensors, tqdm; transformers in its own part."""
    modules = ["bench_gpu", "bench_gpu_part", "bench_gpu_checks", "bench_gpu_kernels"]
    modules += ["bench_gpu_engine", "bench_gpu_sampling", "bench_gpu_transformers"]
    missing = ["grpc", "google.protobuf", "opentelemetry", "yaml", "aiohttp", "xgrammar", "gguf"]
    missing += ["tokenizers", "transformers", "prometheus_client", "huggingface_hub", "jinja2"]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','): importlib.import_module(f'engine_service.{name}')\n"
        "print(*(name for name in sys.argv[2].split(',') if name in sys.modules))"
    )
    command = [sys.executable, "-c", code, ",".join(modules), ",".join(missing)]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []


# ---------------------------------------------------------------- the real thing, small


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    items = {
        item.name: item for item in check_items(CheckSizes.of_interpreter(), torch.device("cpu"))
    }
    assert items["silu_mul, float32"].measure()["error"] < 1e-6
    wrong = torch.nn.functional.silu
    monkeypatch.setattr("kernels.triton.activation.silu_mul", lambda x: wrong(x.chunk(2, -1)[0]))
    with pytest.raises(CheckFailed):
        items["silu_mul, float32"].measure()
    monkeypatch.setattr(
        "kernels.triton.activation.silu_mul", lambda x: x.new_empty(x.shape[0], x.shape[1] // 2)
    )
    with pytest.raises(CheckFailed, match="nan"):  # what is left unwritten
        items["silu_mul, float32"].measure()


@pytest.mark.slow
def test_the_engine_runs_end_to_end(tmp_path: Path) -> None:
    sizes = Sizes(
        prefill=Load(2, 20, 1), decodes=(LOAD,), ablated=(LOAD,), check_tokens=12, num_blocks=32
    )
    bench = EngineBench(TINY, sizes, tmp_path, SmallGpu)
    with np.errstate(all="ignore"):  # the interpreter's numbers
        figures = {item.name: item.measure() for item in bench.items()}
    assert figures["as the reference"]["error"] < 1e-4
    assert figures["start"]["cached_tokens"] == 512
    prefill = figures["prefill of 2 requests, 20 in, 1 out"]
    assert prefill["tokens_s"] > 0
    assert 0 < prefill["share_of_attention"] < 1
    variants = ["", ", without graphs", ", without overlap", ", without overlap and graphs"]
    for variant in variants:
        decode = figures[f"{LOAD}{variant}"]
        num_gaps = LOAD.num_output_tokens - 2  # between steps of single tokens; the run has more
        bound = decode["decode_tokens_s"] * LOAD.num_output_tokens / num_gaps
        assert bound >= decode["output_tokens_s"] > 0
        assert 0 < decode["itl_p50_ms"] <= decode["itl_p99_ms"]
        assert decode["host_us"] > 0


@pytest.mark.slow
def test_transformers_runs_the_same_load() -> None:
    (item,) = TransformersBench(TINY, (LOAD,), torch.device("cpu")).items()
    assert item.name == str(LOAD)
    assert item.measure()["output_tokens_s"] > 0
