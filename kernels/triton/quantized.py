"""Products of rows with an int8 or int4 matrix that is widened tile by tile, in Triton.

The matrices are those of `kernels.reference.quantized`, on the device; rows stay as they are. A
weight is scale * q (+ offset), rounded to the rows' dtype. Both forms take a byte a weight here.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.quantized import GROUP, QuantizedMatrix
from kernels.triton.checks import check_contiguous, check_rows
from kernels.triton.linear_tiles import LinearTiles
from kernels.triton.product import dot

# From so many rows on, to widen the matrix once and leave the product to the library is faster
# than to widen it for every 64 of them. By arithmetic: not measured.
_LIBRARY_ROWS: Final = 512
_GROUPS: Final = 4  # of inputs, by which a sum goes on: a cache line of weights


class QuantizedProducts:
    """`batch_invariant`: a row's bits never depend on how many rows there are."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def linear(self, x_TI: Tensor, matrix: QuantizedMatrix, bias_O: Tensor | None) -> Tensor:
        """x @ matrix.T + bias, [T, O]; summed in float32."""
        if x_TI.shape[0] < _LIBRARY_ROWS or self._batch_invariant:
            return _multiply(x_TI, matrix, bias_O, x_TI.dtype)
        return F.linear(x_TI, _widened(matrix, x_TI.dtype), bias_O)

    def logits_head(self, hidden_RH: Tensor, matrix_VH: QuantizedMatrix) -> Tensor:
        """Logits of the rows that sample, [R, V], float32."""
        return _multiply(hidden_RH, matrix_VH, None, torch.float32)


def _widened(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I]; without a float32 copy."""
    weight_OGI = torch.empty(matrix.values_OGI.shape, dtype=dtype, device=matrix.values_OGI.device)
    scales_OG1 = matrix.scales_OG.float().unsqueeze(-1)
    torch.mul(matrix.values_OGI, scales_OG1, out=weight_OGI)
    if matrix.offsets_OG is not None:
        weight_OGI += matrix.offsets_OG.unsqueeze(-1)
    return weight_OGI.flatten(1)[:, : matrix.num_inputs]


def _multiply(
    x_TI: Tensor, matrix: QuantizedMatrix, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    check_rows("x", x_TI)
    check_contiguous("the matrix", matrix.values_OGI)
    check_contiguous("the scales", matrix.scales_OG)
    if matrix.offsets_OG is not None:
        check_contiguous("the offsets", matrix.offsets_OG)
    num_rows, num_inputs = x_TI.shape
    num_outputs, num_groups, _ = matrix.values_OGI.shape
    if matrix.num_inputs != num_inputs:
        raise ValueError(f"rows of {num_inputs} for a matrix of {matrix.num_inputs} inputs")
    tiles = LinearTiles.of(num_outputs)
    # Products of float32 are written out one by one.
    groups = 1 if x_TI.dtype == torch.float32 else _GROUPS
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    _quantized_kernel[tiles.grid(num_rows, num_outputs)](
        x_TI,
        matrix.values_OGI,
        matrix.scales_OG,
        matrix.offsets_OG,
        bias_O,
        out_TO,
        num_rows,
        x_TI.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        NUM_GROUPS=num_groups,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_GROUPS=groups,
        GROUP=GROUP,
        num_warps=8 if x_TI.dtype == torch.float32 else 4,
        num_stages=tiles.num_stages(groups * GROUP, x_TI.itemsize, 1, x_TI.device),
        enable_fp_fusion=False,
    )
    return out_TO


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_row,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    TILE_INPUTS: tl.constexpr = TILE_GROUPS * GROUP
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inputs, groups = tl.arange(0, TILE_INPUTS), tl.arange(0, TILE_GROUPS)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    x_ptrs = x_ptr + rows[:, None] * stride_row + inputs[None, :]
    group_offsets = outputs.to(tl.int64)[:, None] * NUM_GROUPS + groups[None, :]
    values_rows = values_ptr + outputs.to(tl.int64)[:, None] * (NUM_GROUPS * GROUP)
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first_group in range(0, NUM_GROUPS, TILE_GROUPS):
        first = first_group * GROUP
        is_input = first + inputs < NUM_INPUTS
        x = tl.load(x_ptrs + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        is_weight = is_output[:, None] & is_input[None, :]
        values = tl.load(values_rows + first + inputs[None, :], mask=is_weight, other=0)
        is_group = is_output[:, None] & (first_group + groups < NUM_GROUPS)[None, :]
        scales = tl.load(scales_ptr + group_offsets + first_group, mask=is_group, other=0.0)
        weight = values.to(tl.float32) * _for_each_input(scales, TILE_OUTPUTS, TILE_GROUPS, GROUP)
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + group_offsets + first_group, mask=is_group, other=0.0)
            weight += _for_each_input(offsets, TILE_OUTPUTS, TILE_GROUPS, GROUP)
        sums = dot(x, tl.trans(weight.to(x.dtype)), sums)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptrs, sums, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _for_each_input(
    numbers, TILE_OUTPUTS: tl.constexpr, TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """[TILE_OUTPUTS, TILE_GROUPS * GROUP] float32 from [TILE_OUTPUTS, TILE_GROUPS]."""
    repeated = tl.broadcast_to(
        numbers.to(tl.float32)[:, :, None], (TILE_OUTPUTS, TILE_GROUPS, GROUP)
    )
    return tl.reshape(repeated, (TILE_OUTPUTS, TILE_GROUPS * GROUP))
