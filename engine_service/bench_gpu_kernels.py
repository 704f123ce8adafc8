"""How long Triton's kernels take on a GPU, for `bench_gpu`, in the shapes of Llama.

Bytes are those that a kernel has to read and write, each once, and operations those that it has to
make: what it does beyond that shows as a lower rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from engine_service.bench_gpu_attention import BLOCK_SIZE, AttentionStep, Heads, Share
from engine_service.bench_gpu_items import Figures, Item
from engine_service.bench_gpu_timing import num_copies, replayed_seconds
from kernels.ops import Ops, fp8_triton_ops, quantized_triton_ops, triton_ops
from kernels.reference.quantized import Quantization, quantize_matrix

M = TypeVar("M")

_DTYPE: Final = torch.bfloat16
_HEADS: Final = (Heads(32, 8, 64), Heads(32, 8, 128))
_DECODES: Final = ((1, 8192), (32, 2048), (256, 1024))  # requests, context of each
_CHUNKS: Final = (Share(2048, 2048), Share(8192, 2048))
_MATRIX: Final = (28_672, 4096)  # gate and up of Llama-3.1-8B: outputs, inputs
_NUM_ROWS: Final = (1, 16, 64, 512)
_NUM_TOKENS: Final = 2048
_HIDDEN: Final = 4096
_MLP: Final = 14_336
_EPS: Final = 1e-5


def items() -> list[Item]:
    named = [
        Item("rms_norm", _rms_norm),
        Item("add_rms_norm", _add_rms_norm),
        Item("silu_mul", _silu_mul),
        Item("rotary_cache_write", _rotary_cache_write),
    ]
    for heads in _HEADS:
        for num_requests, context in _DECODES:
            name = f"attention of {num_requests} decodes at {context}, heads of {heads.size}"
            named.append(Item(name, partial(_decode, heads, num_requests, context)))
        for share in _CHUNKS:
            start = share.context - share.num_queries
            name = f"attention of {share.num_queries} at {start}, heads of {heads.size}"
            named.append(Item(name, partial(_chunk, heads, share)))
    for num_rows in _NUM_ROWS:
        named += [
            Item(f"linear of {num_rows} rows, {form}", partial(measure, num_rows))
            for form, measure in _LINEARS.items()
        ]
    return named


def _rates(seconds: float, num_bytes: int, num_operations: int = 0) -> Figures:
    figures = {"us": seconds * 1e6, "gb_s": num_bytes / seconds * 1e-9}
    if num_operations:
        figures["tflop_s"] = num_operations / seconds * 1e-12
    return figures


# ---------------------------------------------------------------- row by row


def _rms_norm() -> Figures:
    weight, ops = _random(_HIDDEN), triton_ops(False)
    inputs = _copies(_random(_NUM_TOKENS, _HIDDEN))
    seconds = replayed_seconds([partial(ops.rms_norm, x, weight, _EPS) for x in inputs])
    return _rates(seconds, 2 * inputs[0].nbytes)


def _add_rms_norm() -> Figures:
    weight, ops = _random(_HIDDEN), triton_ops(False)
    inputs, residuals = (_copies(_random(_NUM_TOKENS, _HIDDEN)) for _ in range(2))
    calls = [
        partial(ops.add_rms_norm, x, residual, weight, _EPS)
        for x, residual in zip(inputs, residuals, strict=True)
    ]
    return _rates(replayed_seconds(calls), 4 * inputs[0].nbytes)


def _silu_mul() -> Figures:
    inputs, ops = _copies(_random(_NUM_TOKENS, 2 * _MLP)), triton_ops(False)
    seconds = replayed_seconds([partial(ops.silu_mul, x) for x in inputs])
    return _rates(seconds, inputs[0].nbytes * 3 // 2)


def _rotary_cache_write() -> Figures:
    heads, ops = _HEADS[1], triton_ops(False)
    num_blocks = _NUM_TOKENS // BLOCK_SIZE
    cache = _random(2, num_blocks, BLOCK_SIZE, heads.kv, heads.size)
    table = _random(_NUM_TOKENS, heads.size)
    positions, slots = (torch.randperm(_NUM_TOKENS, device="cuda") for _ in range(2))
    inputs = _copies(_random(_NUM_TOKENS, heads.query + 2 * heads.kv, heads.size))

    def rotate(qkv: Tensor) -> None:
        q, k, v = torch.split(qkv, [heads.query, heads.kv, heads.kv], dim=1)
        ops.rotary_cache_write(q, k, v, table, positions, slots, cache)

    calls = [partial(rotate, qkv) for qkv in inputs]
    return _rates(replayed_seconds(calls), 2 * inputs[0].nbytes)


# ---------------------------------------------------------------- attention


def _decode(heads: Heads, num_requests: int, context: int) -> Figures:
    shares, device = [Share(context)] * num_requests, torch.device("cuda")
    first = AttentionStep.random(shares, heads, _DTYPE, device)
    steps = [first] + [
        AttentionStep.random(shares, heads, _DTYPE, device)
        for _ in range(num_copies(first.kv_bytes) - 1)
    ]
    attention = triton_ops(False).paged_attention
    seconds = replayed_seconds([partial(step.attend, attention) for step in steps])
    return _rates(seconds, first.kv_bytes, first.operations)


def _chunk(heads: Heads, share: Share) -> Figures:
    step = AttentionStep.random([share], heads, _DTYPE, torch.device("cuda"))
    seconds = replayed_seconds([partial(step.attend, triton_ops(False).paged_attention)] * 4)
    return _rates(seconds, step.kv_bytes, step.operations)


# ---------------------------------------------------------------- matrix products


def _linear(
    ops: Ops[M],
    make_matrix: Callable[[Tensor], M],
    bytes_of: Callable[[M], int],
    num_rows: int,
) -> Figures:
    first = make_matrix(_random(*_MATRIX))
    matrices = [first] + [
        make_matrix(_random(*_MATRIX)) for _ in range(num_copies(bytes_of(first)) - 1)
    ]
    x = _random(num_rows, _MATRIX[1])
    seconds = replayed_seconds([partial(ops.linear, x, matrix, None) for matrix in matrices])
    num_bytes = bytes_of(first) + x.nbytes + num_rows * _MATRIX[0] * x.itemsize
    return _rates(seconds, num_bytes, 2 * num_rows * _MATRIX[0] * _MATRIX[1])


def _linear_bf16(batch_invariant: bool, num_rows: int) -> Figures:
    ops = triton_ops(batch_invariant)
    return _linear(ops, lambda weight: weight, lambda weight: weight.nbytes, num_rows)


def _linear_int(quantization: Quantization, num_rows: int) -> Figures:
    from kernels.triton.quantized import IntMatrix

    return _linear(
        quantized_triton_ops(False),
        lambda weight: IntMatrix.of(quantize_matrix(weight, quantization)),
        lambda matrix: matrix.nbytes,
        num_rows,
    )


def _linear_fp8(num_rows: int) -> Figures:
    from kernels.triton.fp8 import quantize_fp8

    return _linear(
        fp8_triton_ops(),
        quantize_fp8,
        lambda matrix: matrix.values_OI.nbytes + matrix.scales_O.nbytes,
        num_rows,
    )


_LINEARS: Final[dict[str, Callable[[int], Figures]]] = {
    "bf16 of the library": partial(_linear_bf16, False),
    "bf16, batch-invariant": partial(_linear_bf16, True),
    "int8": partial(_linear_int, "int8"),
    "int4": partial(_linear_int, "int4"),
    "fp8": _linear_fp8,
}


# ---------------------------------------------------------------- inputs


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=_DTYPE, device="cuda")


def _copies(x: Tensor) -> Sequence[Tensor]:
    """That together are in no cache."""
    return [x.clone() for _ in range(num_copies(x.nbytes))]
