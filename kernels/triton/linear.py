"""Matrix products whose bits for a row do not depend on the other rows, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_contiguous, check_rows
from kernels.triton.linear_tiles import LinearTiles
from kernels.triton.product import dot, store_product


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [T, O]; summed in float32."""
    return _multiply(x_TI, weight_OI, bias_O, x_TI.dtype)


def logits_head(hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits of the rows that sample, [R, V], float32 whatever the weights are."""
    return _multiply(hidden_RH, weight_VH, None, torch.float32)


def _multiply(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    check_rows("x", x_TI)
    check_contiguous("the matrix", weight_OI)
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    if weight_OI.shape[1] != num_inputs or weight_OI.dtype != x_TI.dtype:
        raise ValueError(
            f"rows of {num_inputs} {x_TI.dtype} for a matrix of {tuple(weight_OI.shape)} "
            f"{weight_OI.dtype}"
        )
    tiles = LinearTiles.of(num_outputs)
    tile_inputs = tiles.input_bytes // x_TI.itemsize
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    _linear_kernel[tiles.grid(num_rows, num_outputs)](
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        num_rows,
        x_TI.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tile_inputs,
        num_warps=8 if x_TI.dtype == torch.float32 else 4,
        num_stages=tiles.num_stages(tiles.input_bytes, tiles.input_bytes, x_TI.device),
        enable_fp_fusion=False,
    )
    return out_TO


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_row,
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
    x_ptrs = x_ptr + rows[:, None] * stride_row + inputs[None, :]
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first in range(0, NUM_INPUTS, TILE_INPUTS):
        is_input = first + inputs < NUM_INPUTS
        x = tl.load(x_ptrs + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(
            weight_ptrs + first, mask=is_output[None, :] & is_input[:, None], other=0.0
        )
        sums = dot(x, weight, sums)
    store_product(sums, bias_ptr, out_ptr, rows, outputs, num_rows, NUM_OUTPUTS)
