"""Triton's kernels outside of its interpreter: compiled for a GPU, and captured in a graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_service.cuda_device import CudaDevice
from kernels.triton.attention import paged_attention
from kernels.triton.block_copy import copy_blocks
from kernels.triton.rotary import rotary_cache_write

_COMPILE = """
import sys, torch
from tests.kernels.hopper_compiler import compile_instead_of_launching

compiled = compile_instead_of_launching()
from kernels.ops import fp8_triton_ops, quantized_triton_ops, triton_ops
from kernels.reference.quantized import quantize_matrix
from kernels.triton.fp8 import quantize_fp8
from kernels.triton.quantized import IntMatrix, widen

dtype, heads, kv_heads, dim = getattr(torch, sys.argv[1]), *map(int, sys.argv[2:])
ops = triton_ops(batch_invariant=True)
x, weight, bias = (torch.ones(shape).to(dtype) for shape in ((70, 96), (40, 96), (40,)))
ops.add_rms_norm(x, x.clone(), ops.rms_norm(x[:1], x[0], 1e-5)[0], 1e-5)
ops.silu_mul(x)
ops.linear(x, weight, bias)
ops.logits_head(x, weight)
for quantization in ("int8", "int4"):
    matrix = IntMatrix.of(quantize_matrix(weight, quantization))
    quantized_triton_ops(True).linear(x, matrix, bias)
    widen(matrix, dtype)
fp8_triton_ops().linear(x, quantize_fp8(weight), bias)

qkv = torch.ones(3, heads + 2 * kv_heads, dim).to(dtype)
q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
cache, numbers = torch.ones(2, 4, 16, kv_heads, dim).to(dtype), torch.arange(3)
ops.rotary_cache_write(q, k, v, torch.ones(3, dim).to(dtype), numbers, numbers, cache)
starts, lengths = torch.tensor([0, 2, 3]).int(), torch.tensor([3, 1]).int()
table = torch.zeros(2, 4).int()
for window in (None, 100):
    ops.paged_attention(q, cache, starts, lengths, table, 0.1, window)
ops.copy_blocks(cache.unsqueeze(0), numbers, numbers)
print(*sorted(set(compiled)))

# A decode has the bits of a chunk only if their products and sums are laid out alike.
from kernels.triton.attention_decode import attend_splits_kernel
from kernels.triton.attention_tiles import attend_tiles_kernel

def forms_of(kernel):
    return list(kernel.device_caches[0][0].values())

def layouts(kernel):
    texts = [form.asm["ttgir"] for form in forms_of(kernel)]
    return [[line for line in text.splitlines() if line.startswith("#mma")] for text in texts]

assert layouts(attend_splits_kernel) == layouts(attend_tiles_kernel)
assert all(layouts(attend_tiles_kernel)) == (dtype != torch.float32)

# As much shared memory as each card has for which Triton compiles.
for form in forms_of(attend_splits_kernel) + forms_of(attend_tiles_kernel):
    assert form.metadata.shared <= 99 * 1024, (form.name, form.metadata.shared)
"""

_KERNELS = [
    "_add_rms_norm_kernel",
    "_copy_kernel",
    "_fp8_kernel",
    "_linear_kernel",
    "_quantize_rows_kernel",
    "_quantized_kernel",
    "_rms_norm_kernel",
    "_rotary_kernel",
    "_silu_mul_kernel",
    "_widen_kernel",
    "add_splits_kernel",
    "attend_splits_kernel",
    "attend_tiles_kernel",
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="all tests compile them")
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"),
    [
        ("bfloat16", 8, 2, 128),
        ("float16", 5, 1, 80),
        ("bfloat16", 16, 1, 256),
        ("float32", 9, 3, 64),
        ("float32", 8, 2, 256),
    ],
)
def test_all_compiles_for_a_gpu(
    dtype: str, heads: int, kv_heads: int, dim: int, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    sizes = [str(size) for size in (heads, kv_heads, dim)]
    finished = subprocess.run(
        [sys.executable, "-c", _COMPILE, dtype, *sizes],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.split() == _KERNELS


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_a_gpu
def test_a_captured_decode_follows_what_the_tensors_hold(device: torch.device) -> None:
    with device:
        q, cache = torch.randn(4, 6, 64), torch.randn(2, 50, 16, 2, 64)
        starts = torch.arange(5, dtype=torch.int32)
        seq_lens = torch.tensor([700, 1, 0, 0], dtype=torch.int32)
        table = torch.randint(0, 50, (4, 50), dtype=torch.int32)
        later = torch.tensor([5, 257, 800, 0], dtype=torch.int32)

    def attend() -> torch.Tensor:
        return paged_attention(q, cache, starts, seq_lens, table, 0.125, None)

    replay = CudaDevice().capture(attend)
    for lengths in (seq_lens.clone(), later):
        seq_lens.copy_(lengths)
        captured = replay().clone()
        assert torch.equal(captured, attend())
        assert (captured[3] == 0.0).all()


@needs_a_gpu
def test_a_cache_of_more_numbers_than_32_bits_can_count(device: torch.device) -> None:
    last = 2**31 // (16 * 2 * 64) + 1  # block
    with device:
        q, k, v = torch.randn(3, 1, 2, 64, dtype=torch.float16).unbind(0)
        cache = torch.empty(2, last + 1, 16, 2, 64, dtype=torch.float16)
        numbers, slots = torch.tensor([0]), torch.tensor([last * 16])
        starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
        rotary_cache_write(q, k, v, torch.ones(1, 64), numbers, slots, cache)
        copy_blocks(cache.unsqueeze(0), torch.tensor([last]), numbers)
        for block in (last, 0):
            table = torch.tensor([[block]]).int()
            assert torch.equal(paged_attention(q, cache, starts, lengths, table, 0.1, None), v)
