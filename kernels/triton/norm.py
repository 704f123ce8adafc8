"""Root-mean-square normalisation in Triton, alone and with the residual addition before it.

A program takes as many rows as its size of row allows. That depends on nothing else, so that the
order of a row's sum is always the same.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_contiguous, check_rows

_PROGRAM_NUMBERS: Final = 2048  # about as many as a program takes
_WARP_NUMBERS: Final = 1024  # of a row that one warp takes


def rms_norm(x_XC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside."""
    size = _check_weight(x_XC, weight_C)
    check_rows("x", x_XC)
    out_XC = torch.empty_like(x_XC, memory_format=torch.contiguous_format)
    # Heads of one buffer lie with gaps between tokens: two dimensions of rows.
    x_YZC = x_XC.unsqueeze(-2) if x_XC.dim() == 2 else x_XC.flatten(0, -3)
    rows, size_padded, num_warps = _shape_of_program(size)
    num_rows = x_YZC.shape[0] * x_YZC.shape[1]
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x_YZC,
        weight_C,
        out_XC,
        num_rows,
        x_YZC.stride(0),
        x_YZC.stride(1),
        eps,
        ROWS_PER_TOKEN=x_YZC.shape[1],
        SIZE=size,
        ROWS=rows,
        C=size_padded,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out_XC


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Adds x to `residual_TH` in place and returns the sum, normalised."""
    size = _check_weight(residual_TH, weight_H)
    check_contiguous("x", x_TH)
    check_contiguous("the residual", residual_TH)
    if x_TH.shape != residual_TH.shape:
        raise ValueError(f"x is {tuple(x_TH.shape)}, residual {tuple(residual_TH.shape)}")
    out_TH = torch.empty_like(x_TH)
    rows, size_padded, num_warps = _shape_of_program(size)
    num_rows = x_TH.shape[0]
    _add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        num_rows,
        eps,
        SIZE=size,
        ROWS=rows,
        C=size_padded,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out_TH


def _check_weight(x_XC: Tensor, weight_C: Tensor) -> int:
    check_contiguous("the weight", weight_C)
    size = x_XC.shape[-1]
    if weight_C.shape != (size,):
        raise ValueError(f"a weight of {tuple(weight_C.shape)} for rows of {size}")
    return size


def _shape_of_program(size: int) -> tuple[int, int, int]:
    """Rows, numbers of a row with its padding, and warps."""
    size_padded = triton.next_power_of_2(size)
    rows = max(1, _PROGRAM_NUMBERS // size_padded)
    return rows, size_padded, min(16, max(4, size_padded // _WARP_NUMBERS))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_token,
    stride_row,
    eps,
    ROWS_PER_TOKEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, C)
    is_there = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    row_offsets = rows // ROWS_PER_TOKEN * stride_token + rows % ROWS_PER_TOKEN * stride_row
    x = tl.load(x_ptr + row_offsets[:, None] + columns[None, :], mask=is_there, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    normal = _normalised(x, weight, eps, SIZE)
    tl.store(out_ptr + rows[:, None] * SIZE + columns[None, :], normal, mask=is_there)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, C)
    is_there = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    offsets = rows[:, None] * SIZE + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=is_there, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + offsets, mask=is_there, other=0.0)
    total = (x + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptr + offsets, total, mask=is_there)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    tl.store(out_ptr + offsets, _normalised(total, weight, eps, SIZE), mask=is_there)


@triton.jit
def _normalised(x, weight, eps, SIZE: tl.constexpr):
    """[ROWS, C] in float32; rounded to x's dtype before the weight, as the reference does."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    normal = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype)
    return normal.to(tl.float32) * weight.to(tl.float32)[None, :]
