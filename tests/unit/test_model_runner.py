"""The runner's own affairs: pool size, dtypes, one step, and failures that stay with their row."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_service.config import CacheConfig, CoreConfig, ModelConfig
from engine_service.cpu_device import CpuDevice
from engine_service.cuda_device import bytes_for_kv_cache
from engine_service.kv_cache_pool import allocate_kv_cache, plan_kv_cache
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_error import ModelError
from engine_service.model_runner import ModelRunner
from engine_service.models.config import DecoderConfig, read_config
from engine_service.request import Request
from engine_service.scheduler_output import BlockCopy, ScheduledRequest, SchedulerOutput
from kernels.reference.linear import linear
from tests.conftest import MakeTinyModel

CPU = torch.device("cpu")
BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4  # of the tiny model in float32


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(core_config(model_dir))


def core_config(model_dir: Path, **model: object) -> CoreConfig:
    return CoreConfig(
        model=ModelConfig(str(model_dir), "tiny", **model),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=8),
    )


def share(
    request_id: str,
    tokens: list[int],
    blocks: list[int],
    num_computed: int = 0,
    num_scheduled: int | None = None,
    params: SamplingParams | None = None,
) -> ScheduledRequest:
    greedy = SamplingParams(temperature=0.0)
    made = Request(request_id, 0, tokens, params or greedy, StoppingCriteria(max_tokens=9))
    count = len(tokens) - num_computed if num_scheduled is None else num_scheduled
    return ScheduledRequest.of(made, num_computed, count, blocks)


def step(runner: ModelRunner, *shares: ScheduledRequest) -> dict[str, int]:
    total = sum(s.num_scheduled_tokens for s in shares)
    result = runner.execute_model(SchedulerOutput(1, list(shares), total), None)
    assert result.failures == {}
    return {key[0]: token_id for key, token_id in result.sampled_token_ids.items()}


def test_a_chunk_that_stops_short_samples_nothing(runner: ModelRunner) -> None:
    tokens = list(range(100, 140))
    whole = step(runner, share("a", tokens, [0, 1, 2]))
    assert step(runner, share("a", tokens, [5, 3, 4], 0, 17)) == {}
    assert step(runner, share("a", tokens, [5, 3, 4], 17, 22)) == {}
    assert step(runner, share("a", tokens, [5, 3, 4], 39)) == whole


def test_blocks_are_copied_before_the_step(runner: ModelRunner) -> None:
    """One request goes on in a copy of another's block while that one writes on in its own."""
    tokens, others = list(range(200, 224)), [*range(200, 220), 7, 8]
    alone = step(runner, share("a", tokens, [0, 1])) | step(runner, share("b", others, [2, 3]))
    step(runner, share("a", tokens, [4, 5], 0, 20))
    shares = [share("a", tokens, [4, 5], 20), share("b", others, [4, 6], 20)]
    copies = [BlockCopy(source=5, destination=6)]
    result = runner.execute_model(SchedulerOutput(2, shares, 6, copies), None)
    assert {key[0]: token for key, token in result.sampled_token_ids.items()} == alone


def test_a_step_without_requests_is_empty(runner: ModelRunner) -> None:
    result = runner.execute_model(SchedulerOutput(1, [], 0), None)
    assert result.sampled_token_ids == {}


def test_samples_are_keyed_by_request_in_a_mixed_batch(runner: ModelRunner) -> None:
    shares = [
        share("a", list(range(50, 70)), [1, 2]),
        share("b", [7, 8, 9], [3], num_scheduled=2),
        share("c", [11], [4], params=SamplingParams(temperature=0.0, num_logprobs=2)),
    ]
    total = sum(s.num_scheduled_tokens for s in shares)
    result = runner.execute_model(SchedulerOutput(1, shares, total), None)
    assert result.sampled_token_ids.keys() == {("a", 0), ("c", 0)}
    assert result.logprobs.keys() == {("c", 0)}
    assert result.logprobs["c", 0].top_token_ids[0] == result.sampled_token_ids["c", 0]
    alone = step(runner, shares[0]) | step(runner, shares[2])
    assert {key[0]: value for key, value in result.sampled_token_ids.items()} == alone


def test_logits_that_are_not_numbers_fail_their_request_only(
    model_dir: Path, tmp_path: Path
) -> None:
    broken_dir = shutil.copytree(model_dir, tmp_path / "broken")
    weights = load_file(broken_dir / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][500] = torch.nan  # as an input; the head is its own
    save_file(weights | {"lm_head.weight": head}, broken_dir / "model.safetensors")
    text = (broken_dir / "config.json").read_text()
    (broken_dir / "config.json").write_text(
        text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    runner = ModelRunner(core_config(broken_dir))
    shares = [share("a", [1, 2, 3], [0]), share("bad", [1, 500, 3], [1]), share("c", [4], [2])]
    result = runner.execute_model(SchedulerOutput(1, shares, 7), None)
    assert result.failures.keys() == {("bad", 0)}
    assert result.failures["bad", 0].reason == "INTERNAL_ERROR"
    assert result.sampled_token_ids.keys() == {("a", 0), ("c", 0)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_dtypes_run(model_dir: Path, dtype: str) -> None:
    runner = ModelRunner(core_config(model_dir, dtype=dtype))
    assert (runner.dtype_name, runner.kv_cache_dtype_name) == (dtype, dtype)
    assert step(runner, share("a", [5, 6, 7], [0])).keys() == {"a"}


def test_a_cache_of_another_dtype(model_dir: Path, runner: ModelRunner) -> None:
    half = ModelRunner(
        CoreConfig(
            model=ModelConfig(str(model_dir), "tiny"),
            cache=CacheConfig(num_blocks=4, kv_cache_dtype="float16"),
        )
    )
    assert (half.dtype_name, half.kv_cache_dtype_name) == ("float32", "float16")
    tokens = list(range(300, 330))
    assert step(half, share("a", tokens, [0, 1])) == step(runner, share("a", tokens, [0, 1]))


_CPU_SECONDS_AFTER_A_STEP = """
import statistics, sys, time
from pathlib import Path
from tests.unit.test_model_runner import ModelRunner, core_config, share, step

runner = ModelRunner(core_config(Path(sys.argv[1])))
shares = [share(str(number), [number], [number]) for number in range(8)]
spent = []
for _ in range(20):
    step(runner, *shares)
    start = time.process_time()
    time.sleep(0.02)
    spent.append(time.process_time() - start)
print(statistics.median(spent))
"""


def test_a_step_leaves_no_thread_spinning(tiny_model_dir: MakeTinyModel) -> None:
    """torch's threads would, for milliseconds, in place of the next step's."""
    model_dir = tiny_model_dir("llama", hidden_size=768)
    command = [sys.executable, "-c", _CPU_SECONDS_AFTER_A_STEP, str(model_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    spent = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert float(spent.stdout) < 0.0007


def test_what_the_runner_says_of_itself(model_dir: Path, runner: ModelRunner) -> None:
    assert runner.architecture == "LlamaForCausalLM"
    assert runner.vocab_size == 49152
    assert runner.eos_token_ids == (2,)
    assert (runner.device_name, runner.dtype_name) == ("cpu", "float32")
    assert (runner.num_blocks, runner.max_model_len) == (8, 128)
    assert (runner.quantization, runner.kv_cache_dtype_name) == ("int8", "float16")
    assert runner.batch_invariant
    assert set(runner.op_backends.values()) == {"cpu"}
    assert len(runner.weights_digest) == 64


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "int8", "dtype 'int8' is not one of auto"),
        ("device", "tpu", "'tpu' is not one of"),
        ("quantization", "int3", "quantization 'int3' is not one of auto, none, int8, int4"),
        ("kernels", "gpu", "kernels 'gpu' are not one of auto, cpu, triton, reference"),
        ("max_model_len", 0, "max_model_len must be at least 1"),
    ],
)
def test_bad_settings_are_model_errors(
    model_dir: Path, field: str, value: object, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelRunner(core_config(model_dir, **{field: value}))


def test_batch_invariance_that_cannot_be_had_is_a_model_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def depends_on_the_place(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        places_T1 = torch.arange(x_TI.shape[0], dtype=x_TI.dtype).unsqueeze(1)
        return linear(x_TI, weight_OI, bias_O) + places_T1

    monkeypatch.setattr("kernels.reference.batch_invariant.linear", depends_on_the_place)
    with pytest.raises(ModelError, match="batch_invariant cannot be had on this machine"):
        ModelRunner(core_config(model_dir, kernels="reference", batch_invariant=True))


@pytest.mark.parametrize(
    ("cache", "asked", "blocks", "max_model_len"),
    [
        (CacheConfig(num_blocks=10), None, 10, 160),
        (CacheConfig(num_blocks=10, kv_cache_memory_bytes=1), None, 10, 160),
        (CacheConfig(kv_cache_memory_bytes=20 * BLOCK_BYTES + 5), None, 20, 320),
        (CacheConfig(num_blocks=1000), None, 1000, 2048),
        (CacheConfig(num_blocks=1000), 300, 1000, 300),
        (CacheConfig(num_blocks=10), 10_000, 10, 160),
    ],
)
def test_pool_and_context_arithmetic(
    model_dir: Path, cache: CacheConfig, asked: int | None, blocks: int, max_model_len: int
) -> None:
    plan = plan_kv_cache(read_config(model_dir), cache, asked, torch.float32, 2**30, nothing)
    assert plan.bytes_per_block == BLOCK_BYTES
    assert (plan.num_blocks, plan.max_model_len) == (blocks, max_model_len)
    assert f"Weights: 1.00 GiB. KV cache: {blocks} blocks x 16 tokens" in str(plan)


@pytest.mark.parametrize(
    ("free_gb", "step_gb", "utilization", "left_gb"),
    [(64, 2, 0.9, 54), (34, 2, 0.9, 24), (64, 0, 0.5, 24), (3, 2, 0.9, 0)],
)
def test_a_gpu_gives_what_weights_and_the_largest_step_leave(
    free_gb: int, step_gb: int, utilization: float, left_gb: int
) -> None:
    gb = 10**9
    found = bytes_for_kv_cache(80 * gb, free_gb * gb, step_gb * gb, utilization)
    assert found == left_gb * gb


def nothing() -> int:
    raise AssertionError("the size is set")


def test_the_default_pool_is_bounded(model_dir: Path) -> None:
    cache = CacheConfig()
    found = CpuDevice().kv_cache_bytes(cache, lambda: None)
    plan = plan_kv_cache(read_config(model_dir), cache, None, torch.float32, 0, lambda: found)
    assert 0 < plan.num_blocks * BLOCK_BYTES <= 2 * 1024**3


def test_a_pool_without_a_block_is_refused(model_dir: Path) -> None:
    for cache in (CacheConfig(num_blocks=0), CacheConfig(kv_cache_memory_bytes=BLOCK_BYTES - 1)):
        with pytest.raises(ModelError, match="no room for one block"):
            plan_kv_cache(read_config(model_dir), cache, None, torch.float32, 0, nothing)


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


def test_the_pool_is_not_resident_before_use(model_dir: Path) -> None:
    config: DecoderConfig = read_config(model_dir)
    num_bytes = 1024**3
    cache = CacheConfig(kv_cache_memory_bytes=num_bytes)
    plan = plan_kv_cache(config, cache, None, torch.float32, 0, nothing)
    before = resident_bytes()
    pool = allocate_kv_cache(config, plan, torch.float32, CPU)
    assert pool.nbytes > num_bytes * 0.99
    assert resident_bytes() - before < num_bytes / 20
