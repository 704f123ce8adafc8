"""Matrices in int8 or int4, and their products with rows that are quantized too.

    matrix   groups of 32 inputs of an output   int8   weight = scale * q           -127 <= q <= 127
                                                int4   weight = scale * q + offset     0 <= q <= 15
    row      groups of 32 of its numbers            x = scale_x * q_x
                                                with int8 matrices      -32767 <= q_x <= 32767
                                                with int4 matrices        -127 <= q_x <= 127
                                                in wide groups          -32639 <= q_x <= 32639

A group is wide if its largest number is more than 6 times the root mean square of its row: such a
number would leave too few of 8 bits for the others.

    y  =  sum over groups of  scale_x * (scale * sum(q_x * q))  +  offset * (scale_x * sum(q_x))

The sums within a group are of integers and exact. Scales and offsets of matrices are float16, so
that the blocks of GGUF's Q8_0 and Q4_1 are had again from the numbers that they stand for. A row is
quantized for itself: what it gives depends on no other row.

G is the number of groups; a last group that is not full is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Quantization = Literal["none", "int8", "int4"]

GROUP: Final = 32  # inputs
_LARGEST_INT8: Final = 127
_LARGEST_INT16: Final = 32767  # of rows beside int8
_LARGEST_WIDE: Final = 127 * 256 + 127  # of rows beside int4, in wide groups
_WIDE_AMAX: Final = 6.0  # root mean squares of the row
_LARGEST_INT4: Final = 15
_LARGEST_FLOAT16: Final = 65504.0
_SMALLEST_AMAX: Final = 1e-30  # a group of smaller numbers is zero: 32767 / amax must be finite


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [O, I]."""

    num_inputs: int
    values_OGI: Tensor  # [O, G, GROUP]: int8; for int4 uint8
    scales_OG: Tensor  # float16
    offsets_OG: Tensor | None  # float16; None for int8


def quantize_matrix(weight_OI: Tensor, quantization: Quantization) -> QuantizedMatrix:
    """To int8 or int4. Raises ValueError for another, and for weights beyond float16."""
    check_representable(weight_OI, quantization)
    groups_OGI = _in_groups(weight_OI.float(), fill_with_last=True)
    lowest_OG1, highest_OG1 = groups_OGI.aminmax(dim=-1, keepdim=True)
    if quantization == "int8":
        amax_OG1 = torch.maximum(highest_OG1, -lowest_OG1)
        scales_OG1 = (amax_OG1 / _LARGEST_INT8).half()
        values_OGI = _on_grid(groups_OGI, scales_OG1, -_LARGEST_INT8, _LARGEST_INT8)
        return QuantizedMatrix(
            weight_OI.shape[1], values_OGI.to(torch.int8), scales_OG1.squeeze(-1), None
        )
    scales_OG1 = ((highest_OG1 - lowest_OG1) / _LARGEST_INT4).half()
    offsets_OG1 = lowest_OG1.half()
    values_OGI = _on_grid(groups_OGI - offsets_OG1.float(), scales_OG1, 0, _LARGEST_INT4)
    return QuantizedMatrix(
        weight_OI.shape[1],
        values_OGI.to(torch.uint8),
        scales_OG1.squeeze(-1),
        offsets_OG1.squeeze(-1),
    )


def check_representable(weight_OI: Tensor, quantization: Quantization) -> None:
    """Raises ValueError unless int8 or int4 is asked for and scales can be had in float16."""
    if quantization not in ("int8", "int4"):
        raise ValueError(f"{quantization!r} is not int8 or int4")
    lowest, highest = (float(bound) for bound in weight_OI.aminmax())
    if not -_LARGEST_FLOAT16 <= lowest <= highest <= _LARGEST_FLOAT16:
        raise ValueError(f"weights from {lowest} to {highest} can't be {quantization}")


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """[O, I] float32: the matrix that products see."""
    weight_OGI = matrix.values_OGI.float() * matrix.scales_OG.float().unsqueeze(-1)
    if matrix.offsets_OG is not None:
        weight_OGI = weight_OGI + matrix.offsets_OG.float().unsqueeze(-1)
    return weight_OGI.flatten(1)[:, : matrix.num_inputs]


def quantize_rows(x_TI: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Integers [T, G, GROUP], in float32, and their scales [T, G], beside an int8 or int4 matrix.

    A group that holds what is not finite has a scale of NaN, and so has all that it gives.
    """
    groups_TGI = _in_groups(x_TI.float(), fill_with_last=False)
    amax_TG1 = groups_TGI.abs().amax(dim=-1, keepdim=True)
    largest_TG1 = _largest_row_values(x_TI.float(), amax_TG1, quantization)
    divided_TG1 = largest_TG1 / amax_TG1
    regular_TG1 = amax_TG1.isfinite() & (amax_TG1 >= _SMALLEST_AMAX)
    quants_TGI = (groups_TGI * divided_TG1).round_().masked_fill_(~regular_TG1, 0.0)
    scales_TG1 = (amax_TG1 / largest_TG1).masked_fill_(amax_TG1 < _SMALLEST_AMAX, 0.0)
    scales_TG1.masked_fill_(~amax_TG1.isfinite(), float("nan"))
    return quants_TGI, scales_TG1.squeeze(-1)


def _largest_row_values(x_TI: Tensor, amax_TG1: Tensor, quantization: Quantization) -> Tensor:
    if quantization == "int8":
        return torch.full_like(amax_TG1, _LARGEST_INT16)
    root_mean_squares_T11 = x_TI.square().mean(dim=1).sqrt().view(-1, 1, 1)
    is_wide_TG1 = amax_TG1 > _WIDE_AMAX * root_mean_squares_T11
    return torch.where(is_wide_TG1, float(_LARGEST_WIDE), float(_LARGEST_INT8))


def quantized_linear(x_TI: Tensor, matrix: QuantizedMatrix, bias_O: Tensor | None) -> Tensor:
    """x @ matrix.T + bias, [T, O], in the rows' dtype and float32 inside."""
    quantization: Quantization = "int8" if matrix.offsets_OG is None else "int4"
    quants_TGI, scales_TG = quantize_rows(x_TI, quantization)
    sums_TG = scales_TG * quants_TGI.sum(dim=-1)
    y_TO = x_TI.new_zeros((x_TI.shape[0], matrix.values_OGI.shape[0]), dtype=torch.float32)
    for group in range(scales_TG.shape[1]):
        # Below 2^53 float64 counts exactly, in any order.
        weight_OI = matrix.values_OGI[:, group].double()
        dots_TO = F.linear(quants_TGI[:, group].double(), weight_OI).float()
        y_TO += scales_TG[:, group, None] * (matrix.scales_OG[:, group].float() * dots_TO)
        if matrix.offsets_OG is not None:
            y_TO += matrix.offsets_OG[:, group].float() * sums_TG[:, group, None]
    if bias_O is not None:
        y_TO += bias_O
    return y_TO.to(x_TI.dtype)


def quantized_logits_head(hidden_RH: Tensor, matrix_VH: QuantizedMatrix) -> Tensor:
    """Logits of the rows that sample, [R, V], float32."""
    return quantized_linear(hidden_RH.float(), matrix_VH, None)


def quantized_embed(input_ids_T: Tensor, table_VH: QuantizedMatrix | Tensor) -> Tensor:
    """[T, H], a new tensor; in float32 where the table is the quantized head."""
    if isinstance(table_VH, Tensor):
        return F.embedding(input_ids_T, table_VH)
    offsets_VG = table_VH.offsets_OG
    rows = QuantizedMatrix(
        table_VH.num_inputs,
        table_VH.values_OGI[input_ids_T],
        table_VH.scales_OG[input_ids_T],
        None if offsets_VG is None else offsets_VG[input_ids_T],
    )
    return dequantize(rows)


def _in_groups(x_XI: Tensor, fill_with_last: bool) -> Tensor:
    """[X, G, GROUP], the last group filled up."""
    num_missing = -x_XI.shape[1] % GROUP
    filling_X1 = x_XI[:, -1:] if fill_with_last else x_XI.new_zeros((x_XI.shape[0], 1))
    filled_XI = torch.cat((x_XI, filling_X1.expand(-1, num_missing)), dim=1)
    return filled_XI.view(x_XI.shape[0], filled_XI.shape[1] // GROUP, GROUP)


def _on_grid(values_OGI: Tensor, scales_OG1: Tensor, lowest: int, highest: int) -> Tensor:
    """Integers; zeros where the scale is zero."""
    scales_OG1 = scales_OG1.float()
    quants_OGI = (values_OGI / scales_OG1).round_().clamp_(lowest, highest)
    return quants_OGI.where(scales_OG1 > 0.0, 0.0)
