"""The whole decoder on Triton's kernels, beside the reference and beside itself in other steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine_service.compute_device import ComputeDevice
from engine_service.cpu_device import CpuDevice
from engine_service.cuda_device import CudaDevice
from engine_service.input_batch import build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_loader import Checkpoint
from engine_service.models.config import read_config
from engine_service.models.decoder import Decoder
from engine_service.models.weights import load_weights
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest
from kernels.ops import Ops, fp8_triton_ops, quantized_triton_ops, reference_ops, triton_ops
from kernels.reference.quantized import quantize_matrix
from kernels.triton.fp8 import Fp8Matrix, quantize_fp8
from kernels.triton.quantized import IntMatrix, widen
from tests.conftest import MakeTinyModel

pytestmark = pytest.mark.slow

M = TypeVar("M")
Step = Sequence[tuple[int, int, int]]  # request, first token, number of tokens

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 16, 20, 300
PROMPTS = [[7 * i % VOCABULARY for i in range(60)], [11 * i % VOCABULARY for i in range(26)]]
# Two cold chunks, a chunk beside a decode, two decodes.
STEPS = [[(0, 0, 20), (1, 0, 24)], [(0, 20, 39), (1, 24, 1)], [(0, 59, 1), (1, 25, 1)]]
WHOLE = [[(0, 0, 60)], [(1, 0, 26)]]


@pytest.fixture
def compute_device(device: torch.device) -> ComputeDevice:
    torch.manual_seed(4)
    return CudaDevice() if device.type == "cuda" else CpuDevice()


def run(
    model_dir: Path,
    ops: Ops[M],
    make_matrix: Callable[[Tensor], M],
    device: ComputeDevice,
    steps: Sequence[Step],
) -> list[Tensor]:
    """Hidden states and logits of each prompt, [its tokens, H + V], float32."""
    config = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:

        def load(name: str) -> Tensor:
            return checkpoint.load(name, torch.float32, device.torch_device)

        weights = load_weights(config, load, lambda spec: make_matrix(spec.load(load)))
    decoder = Decoder(config, weights, ops, max_model_len=100)
    shape = (config.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_cache = torch.full(shape, float("nan"), device=device.torch_device)
    blocks = torch.randperm(NUM_BLOCKS).tolist()
    tables = [blocks[:4], blocks[4:8]]
    requests = [
        Request(str(i), 0, prompt, SamplingParams(), StoppingCriteria(max_tokens=1))
        for i, prompt in enumerate(PROMPTS)
    ]
    rows: list[list[Tensor]] = [[], []]
    with torch.inference_mode():
        for step in steps:
            scheduled = [
                ScheduledRequest.of(requests[r], first, count, tables[r])
                for r, first, count in step
            ]
            hidden_TH = decoder.forward(build_input_batch(scheduled, BLOCK_SIZE, device), kv_cache)
            all_T = torch.cat((hidden_TH, decoder.logits(hidden_TH)), dim=-1)
            parts = torch.split(all_T, [count for _, _, count in step])
            for (r, _, _), part in zip(step, parts, strict=True):
                rows[r].append(part)
    return [torch.cat(parts) for parts in rows]


def itself(matrix: Tensor) -> Tensor:
    return matrix


def in_int8(matrix: Tensor) -> IntMatrix:
    return IntMatrix.of(quantize_matrix(matrix, "int8"))


def in_int4(matrix: Tensor) -> IntMatrix:
    return IntMatrix.of(quantize_matrix(matrix, "int4"))


def error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Of the norm."""
    difference = torch.cat(tuple(got)) - torch.cat(tuple(want))
    return float(difference.norm() / torch.cat(tuple(want)).norm())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
        ("mistral", {"sliding_window": 20, "tie_word_embeddings": False}),
        ("qwen2", {"num_key_value_heads": 1}),  # with biases
        ("qwen3", {}),  # with norms of heads
    ],
)
def test_steps_as_of_the_reference(
    tiny_model_dir: MakeTinyModel,
    compute_device: ComputeDevice,
    arch: str,
    overrides: dict[str, object],
    batch_invariant: bool,
) -> None:
    model_dir = tiny_model_dir(arch, vocab_size=VOCABULARY, **overrides)
    got = run(model_dir, triton_ops(batch_invariant), itself, compute_device, STEPS)
    want = run(model_dir, reference_ops(), itself, compute_device, STEPS)
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("make_matrix", [in_int8, in_int4])
def test_integers_as_what_they_stand_for(
    tiny_model_dir: MakeTinyModel,
    compute_device: ComputeDevice,
    make_matrix: Callable[[Tensor], IntMatrix],
) -> None:
    def widened(matrix: Tensor) -> Tensor:
        return widen(make_matrix(matrix), torch.float32)

    model_dir = tiny_model_dir("llama", vocab_size=VOCABULARY)
    got = run(model_dir, quantized_triton_ops(False), make_matrix, compute_device, STEPS)
    want = run(model_dir, reference_ops(), widened, compute_device, STEPS)
    assert error(got, want) < 1e-5


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("form", ["plain", "int8", "int4", "fp8"])
def test_a_token_has_the_same_bits_in_any_step(
    tiny_model_dir: MakeTinyModel, compute_device: ComputeDevice, form: str
) -> None:
    model_dir = tiny_model_dir("llama", vocab_size=VOCABULARY)

    def rows_of(steps: Sequence[Step]) -> list[Tensor]:
        if form in ("int8", "int4"):
            in_integers = in_int8 if form == "int8" else in_int4
            return run(model_dir, quantized_triton_ops(True), in_integers, compute_device, steps)
        if form == "fp8":
            ops: Ops[Fp8Matrix] = fp8_triton_ops()
            return run(model_dir, ops, quantize_fp8, compute_device, steps)
        return run(model_dir, triton_ops(True), itself, compute_device, steps)

    for one, other in zip(rows_of(STEPS), rows_of(WHOLE), strict=True):
        assert torch.equal(one, other)
