"""Products in float8 (e4m3) in Triton: a scale for each row, and one for each output.

    y  =  scale_x * scale * sum(x_q * q)      q, x_q: float8, of at most 448

Rows are quantized for themselves and tiles are fixed: a row's bits do not depend on the others.
Needs a GPU whose matrix instructions take float8 (compute capability 8.9 and up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_contiguous, check_rows
from kernels.triton.linear_tiles import LinearTiles
from kernels.triton.product import store_product

_LARGEST: Final = 448.0  # of e4m3
_SMALLEST_AMAX: Final = 1e-12  # of a row of zeros

_LARGEST_E4M3 = tl.constexpr(_LARGEST)
_SMALLEST = tl.constexpr(_SMALLEST_AMAX)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [O, I] whose weights are scale * value."""

    values_OI: Tensor  # float8_e4m3fn, contiguous
    scales_O: Tensor  # float32


def quantize_fp8(weight_OI: Tensor) -> Fp8Matrix:
    amax_O1 = weight_OI.float().abs().amax(dim=1, keepdim=True).clamp_(min=_SMALLEST_AMAX)
    scales_O1 = amax_O1 / _LARGEST
    values_OI = (weight_OI.float() / scales_O1).to(torch.float8_e4m3fn)
    return Fp8Matrix(values_OI, scales_O1.squeeze(1))


def fp8_embed(input_ids_T: Tensor, table_VH: Fp8Matrix | Tensor) -> Tensor:
    """[T, H], a new tensor; in float32 where the table is the quantized head."""
    if isinstance(table_VH, Tensor):
        return F.embedding(input_ids_T, table_VH)
    # As bytes: not every library gathers float8.
    values_TH = F.embedding(input_ids_T, table_VH.values_OI.view(torch.uint8))
    scales_T1 = table_VH.scales_O[input_ids_T].unsqueeze(1)
    return values_TH.view(torch.float8_e4m3fn).float() * scales_T1


def fp8_linear(x_TI: Tensor, matrix: Fp8Matrix, bias_O: Tensor | None) -> Tensor:
    """x @ matrix.T + bias, [T, O]; a row with a number that is not finite gives NaNs."""
    return _multiply(x_TI, matrix, bias_O, x_TI.dtype)


def fp8_logits_head(hidden_RH: Tensor, matrix_VH: Fp8Matrix) -> Tensor:
    """Logits of the rows that sample, [R, V], float32."""
    return _multiply(hidden_RH, matrix_VH, None, torch.float32)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """[T, I] float8_e4m3fn, and the rows' scales [T] float32."""
    check_rows("x", x_TI)
    num_rows, num_inputs = x_TI.shape
    values_TI = torch.empty_like(
        x_TI, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format
    )
    scales_T = torch.empty(num_rows, dtype=torch.float32, device=x_TI.device)
    padded = triton.next_power_of_2(num_inputs)
    _quantize_rows_kernel[(num_rows,)](
        x_TI,
        values_TI,
        scales_T,
        x_TI.stride(0),
        NUM_INPUTS=num_inputs,
        TILE_INPUTS=padded,
        num_warps=8 if padded > 2048 else 4,
        enable_fp_fusion=False,
    )
    return values_TI, scales_T


def _multiply(x_TI: Tensor, matrix: Fp8Matrix, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    check_contiguous("the matrix", matrix.values_OI)
    num_outputs, num_inputs = matrix.values_OI.shape
    num_rows = x_TI.shape[0]
    if x_TI.shape[1] != num_inputs:
        raise ValueError(f"rows of {x_TI.shape[1]} for a matrix of {num_inputs} inputs")
    values_TI, scales_T = quantize_rows(x_TI)
    tiles = LinearTiles.of(num_outputs)
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    _fp8_kernel[tiles.grid(num_rows, num_outputs)](
        values_TI,
        scales_T,
        matrix.values_OI,
        matrix.scales_O,
        bias_O,
        out_TO,
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.input_bytes,
        num_warps=4,
        num_stages=tiles.num_stages(tiles.input_bytes, tiles.input_bytes, x_TI.device),
        enable_fp_fusion=False,
    )
    return out_TO


@triton.jit
def _quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, stride_row, NUM_INPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, TILE_INPUTS)
    is_input = inputs < NUM_INPUTS
    x = tl.load(x_ptr + row * stride_row + inputs, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), _SMALLEST) / _LARGEST_E4M3
    values = _on_e4m3_grid(x / scale).to(tl.float8e4nv)
    tl.store(values_ptr + row * NUM_INPUTS + inputs, values, mask=is_input)
    # A maximum may pass over NaNs, and a cast may make numbers of them.
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0) == 1
    tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))


@triton.jit
def _on_e4m3_grid(x):
    """The nearest number of e4m3, ties to even, in float32; then the cast is exact everywhere."""
    bits = x.to(tl.int32, bitcast=True)
    # 3 of the 23 bits of a fraction are kept.
    rounded_bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = rounded_bits.to(tl.float32, bitcast=True)
    # Below 2^-6 numbers are multiples of 2^-9: the last bit of those beside 1.5 * 2^14.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(
    x_ptr,
    row_scales_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inputs = tl.arange(0, TILE_INPUTS)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    x_ptrs = x_ptr + rows[:, None] * NUM_INPUTS + inputs[None, :]
    values_ptrs = values_ptr + outputs.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first in range(0, NUM_INPUTS, TILE_INPUTS):
        is_input = first + inputs < NUM_INPUTS
        x = tl.load(x_ptrs + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        values = tl.load(
            values_ptrs + first, mask=is_output[None, :] & is_input[:, None], other=0.0
        )
        # Hopper adds up fewer than float32's bits unless told how often to carry over.
        sums = tl.dot(x, values, sums, max_num_imprecise_acc=TILE_INPUTS)
    row_scales = tl.load(row_scales_ptr + rows, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + outputs, mask=is_output, other=0.0)
    sums = sums * row_scales[:, None] * scales[None, :]
    store_product(sums, bias_ptr, out_ptr, rows, outputs, num_rows, NUM_OUTPUTS)
