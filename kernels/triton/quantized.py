"""Products of rows with an int8 or int4 matrix that is widened tile by tile, in Triton.

The weights are those of `kernels.reference.quantized`, scale * q (+ offset), rounded to the rows'
dtype; rows stay as they are.

    bytes of a group    int8   | q0 | q1 | q2 | ... | q31 |
                        int4   | q1 q0 | q3 q2 | ... | q31 q30 |     the even ones in the low bits

Two weights of a byte are neighbours, so that a thread widens what it has read without asking
another for any of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.quantized import GROUP, QuantizedMatrix
from kernels.triton.checks import check_contiguous, check_rows
from kernels.triton.linear_tiles import LinearTiles
from kernels.triton.product import dot, store_product

# From so many rows on, to widen the matrix once and leave the product to the library is faster
# than to widen it for every 64 of them. By arithmetic: not measured.
_LIBRARY_ROWS: Final = 512
_GROUPS: Final = 4  # of inputs, by which a sum goes on: a cache line of int8 weights
_WIDENED_OUTPUTS: Final = 32  # by a program, where the whole matrix is widened

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """A matrix [O, I] in int8 or int4, as the kernels read it: contiguous, on the device."""

    num_inputs: int
    values_OGB: Tensor  # [O, G, 32] int8; for int4 [O, G, 16] uint8
    scales_OG: Tensor  # float16
    offsets_OG: Tensor | None  # float16; None for int8

    @classmethod
    def of(cls, matrix: QuantizedMatrix) -> IntMatrix:
        """Shares all but int4's values with it."""
        values_OGB = matrix.values_OGI
        if matrix.offsets_OG is not None:
            values_OGB = values_OGB[..., ::2] | values_OGB[..., 1::2] << 4
        return cls(matrix.num_inputs, values_OGB, matrix.scales_OG, matrix.offsets_OG)

    @property
    def nbytes(self) -> int:
        offsets_bytes = 0 if self.offsets_OG is None else self.offsets_OG.nbytes
        return self.values_OGB.nbytes + self.scales_OG.nbytes + offsets_bytes


class QuantizedProducts:
    """`batch_invariant`: a row's bits never depend on how many rows there are."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def linear(self, x_TI: Tensor, matrix: IntMatrix, bias_O: Tensor | None) -> Tensor:
        """x @ matrix.T + bias, [T, O]; summed in float32."""
        if x_TI.shape[0] < _LIBRARY_ROWS or self._batch_invariant:
            return _multiply(x_TI, matrix, bias_O, x_TI.dtype)
        return F.linear(x_TI, widen(matrix, x_TI.dtype), bias_O)

    def logits_head(self, hidden_RH: Tensor, matrix_VH: IntMatrix) -> Tensor:
        """Logits of the rows that sample, [R, V], float32."""
        return _multiply(hidden_RH, matrix_VH, None, torch.float32)


def int_embed(input_ids_T: Tensor, table_VH: IntMatrix | Tensor) -> Tensor:
    """[T, H], a new tensor; in float32 where the table is the quantized head."""
    if isinstance(table_VH, Tensor):
        return F.embedding(input_ids_T, table_VH)
    offsets_VG = table_VH.offsets_OG
    rows = IntMatrix(
        table_VH.num_inputs,
        table_VH.values_OGB[input_ids_T],
        table_VH.scales_OG[input_ids_T],
        None if offsets_VG is None else offsets_VG[input_ids_T],
    )
    return widen(rows, torch.float32)


def widen(matrix: IntMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I]: the matrix that products see."""
    _check_matrix(matrix)
    num_outputs, num_groups, _ = matrix.values_OGB.shape
    out_OI = torch.empty(
        (num_outputs, matrix.num_inputs), dtype=dtype, device=matrix.values_OGB.device
    )
    grid = triton.cdiv(num_groups, _GROUPS), triton.cdiv(num_outputs, _WIDENED_OUTPUTS)
    _widen_kernel[grid](
        matrix.values_OGB,
        matrix.scales_OG,
        matrix.offsets_OG,
        out_OI,
        num_outputs,
        NUM_INPUTS=matrix.num_inputs,
        NUM_GROUPS=num_groups,
        TILE_OUTPUTS=_WIDENED_OUTPUTS,
        TILE_GROUPS=_GROUPS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_OI


def _multiply(x_TI: Tensor, matrix: IntMatrix, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    check_rows("x", x_TI)
    _check_matrix(matrix)
    num_rows, num_inputs = x_TI.shape
    num_outputs, num_groups, _ = matrix.values_OGB.shape
    if matrix.num_inputs != num_inputs:
        raise ValueError(f"rows of {num_inputs} for a matrix of {matrix.num_inputs} inputs")
    tiles = LinearTiles.of(num_outputs)
    # Products of float32 are written out one by one.
    groups = 1 if x_TI.dtype == torch.float32 else _GROUPS
    widened_bytes = groups * GROUP * x_TI.itemsize
    stored_bytes = groups * matrix.nbytes // (num_outputs * num_groups)
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    _quantized_kernel[tiles.grid(num_rows, num_outputs)](
        x_TI,
        matrix.values_OGB,
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
        num_warps=8 if x_TI.dtype == torch.float32 else 4,
        num_stages=tiles.num_stages(widened_bytes, stored_bytes, x_TI.device, widened_bytes),
        enable_fp_fusion=False,
    )
    return out_TO


def _check_matrix(matrix: IntMatrix) -> None:
    check_contiguous("the matrix", matrix.values_OGB)
    check_contiguous("the scales", matrix.scales_OG)
    if matrix.offsets_OG is not None:
        check_contiguous("the offsets", matrix.offsets_OG)


@triton.jit(do_not_specialize=["num_outputs"])
def _widen_kernel(
    values_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    first_group = tl.program_id(0) * TILE_GROUPS
    outputs = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inputs = first_group * _GROUP + tl.arange(0, TILE_GROUPS * _GROUP)
    is_output, is_input = outputs < num_outputs, inputs < NUM_INPUTS
    weight = _widened_tile(
        values_ptr,
        scales_ptr,
        offsets_ptr,
        outputs,
        is_output,
        first_group,
        NUM_GROUPS,
        TILE_GROUPS,
    )
    out_ptrs = out_ptr + outputs[:, None] * NUM_INPUTS + inputs[None, :]
    tl.store(out_ptrs, weight, mask=is_output[:, None] & is_input[None, :])


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
):
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inputs = tl.arange(0, TILE_GROUPS * _GROUP)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    x_ptrs = x_ptr + rows[:, None] * stride_row + inputs[None, :]
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first_group in range(0, NUM_GROUPS, TILE_GROUPS):
        first = first_group * _GROUP
        is_input = first + inputs < NUM_INPUTS
        x = tl.load(x_ptrs + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight = _widened_tile(
            values_ptr,
            scales_ptr,
            offsets_ptr,
            outputs,
            is_output,
            first_group,
            NUM_GROUPS,
            TILE_GROUPS,
        )
        sums = dot(x, tl.trans(weight.to(x.dtype)), sums)
    store_product(sums, bias_ptr, out_ptr, rows, outputs, num_rows, NUM_OUTPUTS)


@triton.jit
def _widened_tile(
    values_ptr,
    scales_ptr,
    offsets_ptr,
    outputs,
    is_output,
    first_group,
    NUM_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """Weights of outputs and TILE_GROUPS groups, [outputs, TILE_GROUPS * _GROUP], float32.

    Zeros where there is no output or group. scale * q is exact: 11 bits and at most 8.
    """
    NUM_BYTES: tl.constexpr = _GROUP if offsets_ptr is None else _GROUP // 2  # of a group
    groups = first_group + tl.arange(0, TILE_GROUPS)
    is_group = is_output[:, None] & (groups < NUM_GROUPS)[None, :]
    group_places = outputs[:, None] * NUM_GROUPS + groups[None, :]
    scales = tl.load(scales_ptr + group_places, mask=is_group, other=0.0).to(tl.float32)
    places = first_group * NUM_BYTES + tl.arange(0, TILE_GROUPS * NUM_BYTES)
    is_value = is_output[:, None] & (places < NUM_GROUPS * NUM_BYTES)[None, :]
    values_ptrs = values_ptr + outputs[:, None] * (NUM_GROUPS * NUM_BYTES) + places[None, :]
    values = tl.load(values_ptrs, mask=is_value, other=0)
    scale = _for_each_byte(scales, NUM_BYTES)
    if offsets_ptr is None:
        weight = values.to(tl.float32) * scale
    else:
        offsets = tl.load(offsets_ptr + group_places, mask=is_group, other=0.0).to(tl.float32)
        offset = _for_each_byte(offsets, NUM_BYTES)
        pairs = values.to(tl.int32)
        even = tl.fma((pairs & 15).to(tl.float32), scale, offset)
        # The high bits stay where they are: 16 * q, at a sixteenth of the scale.
        odd = tl.fma((pairs & 240).to(tl.float32), scale * 0.0625, offset)
        weight = tl.interleave(even, odd)
    return weight


@triton.jit
def _for_each_byte(numbers, NUM_BYTES: tl.constexpr):
    """[outputs, groups * NUM_BYTES] from numbers of groups, [outputs, groups]."""
    num_outputs: tl.constexpr = numbers.shape[0]
    num_groups: tl.constexpr = numbers.shape[1]
    repeated = tl.broadcast_to(numbers[:, :, None], (num_outputs, num_groups, NUM_BYTES))
    return tl.reshape(repeated, (num_outputs, num_groups * NUM_BYTES))
