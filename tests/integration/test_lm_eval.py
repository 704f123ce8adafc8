"""lm-eval asks the real server in both of its ways and computes what transformers does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tests.serving import Served, post, serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LM_EVAL = ROOT / ".venv" / "eval" / "bin" / "lm_eval"
NUM_FACTS = 6
NUM_CHOICES = 4


@pytest.fixture(scope="module")
def exact(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that computes as transformers does by default: in float32 throughout."""
    if not LM_EVAL.is_file():
        reason = "lm-eval is not installed: run scripts/install_eval.sh"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    flags = ("--quantization", "none", "--kv-cache-dtype", "float32")
    with serve(embedded_model_dir, tmp_path_factory.mktemp("exact"), *flags) as running:
        yield running


def evaluate(
    model: str, arguments: dict[str, str], tasks: str, work_dir: Path, *flags: str
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The results and the samples, by task."""
    command = [str(LM_EVAL), "run", "--model", model, "--tasks", tasks, *flags]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", "tests/lm_eval_tasks", "--log_samples"]
    command += ["--output_path", str(work_dir)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work_dir / "hf")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = work_dir.glob("*/results_*.json")
    samples = {
        task: [
            json.loads(line)
            for path in work_dir.glob(f"*/samples_{task}_*.jsonl")
            for line in path.read_text().splitlines()
        ]
        for task in tasks.split(",")
    }
    return json.loads(results.read_text())["results"], samples


def logprob_of(model: Any, tok: PreTrainedTokenizerBase, context: str, continuation: str) -> float:
    """Of the continuation, by transformers."""
    num_context = len(tok(context).input_ids)
    ids = torch.tensor([tok(context + continuation).input_ids])
    with torch.inference_mode():
        logprobs = model(ids).logits[0].log_softmax(-1)
    places = range(num_context - 1, ids.shape[1] - 1)
    return float(sum(logprobs[place, ids[0, place + 1]] for place in places))


def test_local_completions(
    exact: Served, embedded_model_dir: Path, tok: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Choices are scored by their log probabilities, which come by echo."""
    results, samples = evaluate(
        "local-completions",
        {
            "model": exact.model,
            "base_url": exact.http + "/v1/completions",
            "tokenizer": str(embedded_model_dir),
            "num_concurrent": "4",
        },
        "firsttoken_facts_choice,firsttoken_facts_words",
        tmp_path,
    )
    model = AutoModelForCausalLM.from_pretrained(embedded_model_dir, dtype=torch.float32)
    scored = samples["firsttoken_facts_choice"]
    assert len(scored) == NUM_FACTS
    for sample in scored:
        assert len(sample["resps"]) == NUM_CHOICES
        for asked, ((logprob, _),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            expected = logprob_of(model, tok, asked["arg_0"], asked["arg_1"])
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
    assert results["firsttoken_facts_choice"]["acc,none"] == 1.0
    check_words(samples["firsttoken_facts_words"])
    (paris,) = (s for s in samples["firsttoken_facts_words"] if "France" in s["doc"]["question"])
    assert paris["resps"][0][0].strip() == "Paris"


def test_local_chat_completions(exact: Served, tmp_path: Path) -> None:
    _, samples = evaluate(
        "local-chat-completions",
        {
            "model": exact.model,
            "base_url": exact.http + "/v1/chat/completions",
            "num_concurrent": "4",
        },
        "firsttoken_facts_words",
        tmp_path,
        "--apply_chat_template",
    )
    said = samples["firsttoken_facts_words"]
    check_words(said)
    for sample in said:  # what the server says to anyone
        question = {"role": "user", "content": sample["doc"]["question"]}
        body = {"model": exact.model, "messages": [question], "temperature": 0, "max_tokens": 16}
        status, answer, _ = asyncio.run(
            post(exact.http, "/v1/chat/completions", {**body, "stop": [".", "\n"]})
        )
        assert status == 200, answer
        assert sample["resps"][0][0] == answer["choices"][0]["message"]["content"]


def check_words(samples: list[dict[str, Any]]) -> None:
    assert len(samples) == NUM_FACTS
    for sample in samples:
        ((text,),) = sample["resps"]
        assert text.strip() and "." not in text and "\n" not in text
