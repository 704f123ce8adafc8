"""Matrix products in Triton beside float64, for `bench_gpu`: as `bench_gpu_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine_service.bench_gpu_errors import (
    BOUNDS,
    poisoned,
    relative_error,
    share_that_differs,
    within,
)
from engine_service.bench_gpu_items import Figures
from kernels.ops import fp8_triton_ops, quantized_triton_ops, triton_ops
from kernels.reference.quantized import Quantization, dequantize, quantize_matrix

_FP8_BOUND: Final = 5e-3  # matrix units add float8 products up in fewer bits than float32's
_FP8_ROWS_BOUND: Final = 0.05  # of rows with 3 bits of fraction beside themselves


@dataclass(frozen=True, slots=True)
class ProductSizes:
    matrices: tuple[tuple[int, int], ...]  # outputs, inputs
    num_rows: tuple[int, ...]


def _matrices(
    sizes: ProductSizes, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """[O, I], and some rows [T, I] for it."""
    for num_outputs, num_inputs in sizes.matrices:
        weight = torch.randn(num_outputs, num_inputs, dtype=dtype, device=device)
        yield (
            weight,
            [torch.randn(rows, num_inputs, dtype=dtype, device=device) for rows in sizes.num_rows],
        )


def linear(sizes: ProductSizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """With a bias, and as the head."""
    ops, errors = triton_ops(batch_invariant=True), []
    for weight, inputs in _matrices(sizes, dtype, device):
        bias = torch.randn(len(weight), dtype=dtype, device=device)
        for x in inputs:
            exact = x.double() @ weight.double().T
            with poisoned():
                errors.append(relative_error(ops.linear(x, weight, bias), exact + bias.double()))
                errors.append(relative_error(ops.logits_head(x, weight), exact))
    return within(BOUNDS[dtype], errors)


def linear_bits(sizes: ProductSizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Of rows among many, and of the same ones alone."""
    ops, differing = triton_ops(batch_invariant=True), []
    for weight, inputs in _matrices(sizes, dtype, device):
        x = inputs[-1]
        together = ops.linear(x, weight, None)
        for row in (0, len(x) // 2, len(x) - 1):
            alone = ops.linear(x[row : row + 1].clone(), weight, None)
            differing.append(share_that_differs(alone, together[row : row + 1]))
    return within(0.0, differing)


def quantized(
    quantization: Quantization, sizes: ProductSizes, dtype: torch.dtype, device: torch.device
) -> Figures:
    """Beside what the matrix stands for; below and above the rows that go to the library."""
    from kernels.triton.quantized import IntMatrix

    errors = []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_matrix(weight, quantization)
        wide, stored = dequantize(matrix).double(), IntMatrix.of(matrix)
        for x in inputs:
            exact = x.double() @ wide.T
            for batch_invariant in (False, True):
                ops = quantized_triton_ops(batch_invariant)
                with poisoned():
                    errors.append(relative_error(ops.linear(x, stored, None), exact))
                    errors.append(relative_error(ops.logits_head(x, stored), exact))
    return within(BOUNDS[dtype], errors)


def fp8(sizes: ProductSizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Beside the rows and the matrix as they are in float8."""
    from kernels.triton.fp8 import quantize_fp8, quantize_rows

    ops, errors = fp8_triton_ops(), []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_fp8(weight)
        wide = matrix.values_OI.double() * matrix.scales_O.double()[:, None]
        for x in inputs:
            with poisoned():
                values, scales = quantize_rows(x)
                got = ops.linear(x, matrix, None)
            exact = (values.double() * scales.double()[:, None]) @ wide.T
            errors.append(relative_error(got, exact))
    return within(max(BOUNDS[dtype], _FP8_BOUND), errors)


def fp8_beside_exact_rows(sizes: ProductSizes, dtype: torch.dtype, device: torch.device) -> Figures:
    from kernels.triton.fp8 import quantize_fp8

    ops, errors = fp8_triton_ops(), []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_fp8(weight)
        wide = matrix.values_OI.double() * matrix.scales_O.double()[:, None]
        errors += [relative_error(ops.logits_head(x, matrix), x.double() @ wide.T) for x in inputs]
    return within(_FP8_ROWS_BOUND, errors)
