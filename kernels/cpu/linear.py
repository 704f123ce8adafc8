"""Products of rows with a matrix packed for them: float32, or int8 or int4 with rows quantized too.

    none    float32 as it is
    int8    weight = scale * q             a float16 scale for each 32 inputs of an output
    int4    weight = scale * q + offset    both float16, likewise

With int8 and int4 a row is quantized for itself, with a scale for each 32 of its numbers, and
multiplied in integers: of 16 bits beside int8 weights, where fewer would not be faster; beside int4
ones of 8, or of 16 where one number is far larger than the row's others. What a row gives has the
same bits whatever the other rows are, and however many threads compute.
`kernels.reference.quantized` is the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.library import INT, POINTER, address, function
from kernels.reference.quantized import Quantization as Quantization
from kernels.reference.quantized import check_representable

LAYOUT_VERSION: Final = 3  # of packed bytes; goes up with every change of linear_layout.h
ALIGNMENT: Final = 64  # bytes
FORMATS: Final[dict[Quantization, int]] = {"none": 0, "int8": 1, "int4": 2}

_PACKED_BYTES_ARGUMENTS: Final = (INT, INT, INT)
_PACK_ARGUMENTS: Final = (INT, POINTER, INT, INT, POINTER)
_LINEAR_ARGUMENTS: Final = (INT, INT, INT, POINTER, POINTER, INT, INT, POINTER, POINTER, INT)
_UNPACK_ARGUMENTS: Final = (INT, INT, INT, POINTER, POINTER, INT, POINTER)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [O, I] in the kernels' form."""

    quantization: Quantization
    num_outputs: int
    num_inputs: int
    data: Tensor  # uint8, `packed_bytes` long, aligned; may be a view of a mapped file

    def __post_init__(self) -> None:
        size = packed_bytes(self.num_outputs, self.num_inputs, self.quantization)
        if self.data.dtype != torch.uint8 or self.data.device.type != "cpu":
            raise TypeError(f"packed data are {self.data.dtype} on {self.data.device}, not bytes")
        if self.data.shape != (size,) or not self.data.is_contiguous():
            raise ValueError(f"packed data are {tuple(self.data.shape)}, not {size} bytes")
        if self.data.data_ptr() % ALIGNMENT:
            raise ValueError(f"packed data are not aligned to {ALIGNMENT} bytes")


def packed_bytes(num_outputs: int, num_inputs: int, quantization: Quantization) -> int:
    """Raises ValueError for a size or a quantization that there is not."""
    if quantization not in FORMATS or num_outputs < 1 or num_inputs < 1:
        raise ValueError(f"there is no {quantization} form of a [{num_outputs}, {num_inputs}]")
    count = function("ft_packed_bytes", _PACKED_BYTES_ARGUMENTS, INT)
    return count(FORMATS[quantization], num_outputs, num_inputs)


def pack_matrix(weight_OI: Tensor, quantization: Quantization) -> PackedMatrix:
    """A packed copy. Raises ValueError for weights that int8 or int4 can't hold (see reference)."""
    if weight_OI.dim() != 2:
        raise ValueError(f"a matrix has two dimensions, not {weight_OI.dim()}")
    num_outputs, num_inputs = weight_OI.shape
    size = packed_bytes(num_outputs, num_inputs, quantization)
    weight_OI = weight_OI.detach().to("cpu", torch.float32).contiguous()
    if quantization != "none":
        check_representable(weight_OI, quantization)
    data = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    data = data[-data.data_ptr() % ALIGNMENT :][:size]
    pack = function("ft_pack_matrix", _PACK_ARGUMENTS)
    pack(FORMATS[quantization], weight_OI.data_ptr(), num_outputs, num_inputs, data.data_ptr())
    return PackedMatrix(quantization, num_outputs, num_inputs, data)


def linear(
    x_TI: Tensor, matrix: PackedMatrix, bias_O: Tensor | None, out_TO: Tensor | None = None
) -> Tensor:
    """x @ matrix.T + bias, [T, O] float32; written to `out_TO` if given.

    Rows of x and of out may be strided. A row with a number that is not finite gives NaNs, if the
    matrix is quantized, and hurts no other row. Raises TypeError and ValueError.
    """
    num_outputs, num_inputs = matrix.num_outputs, matrix.num_inputs
    _check_rows("x", x_TI, num_inputs)
    num_rows = x_TI.shape[0]
    if out_TO is None:
        out_TO = x_TI.new_empty((num_rows, num_outputs))
    else:
        _check_rows("out", out_TO, num_outputs)
        if out_TO.shape[0] != num_rows or (num_rows > 1 and out_TO.stride(0) < num_outputs):
            raise ValueError(f"out is not {num_rows} rows that lie apart")
    if bias_O is not None:
        _check_bias(bias_O, num_outputs)
    multiply = function("ft_linear", _LINEAR_ARGUMENTS)
    multiply(
        FORMATS[matrix.quantization],
        num_outputs,
        num_inputs,
        matrix.data.data_ptr(),
        x_TI.data_ptr(),
        x_TI.stride(0),
        num_rows,
        address(bias_O),
        out_TO.data_ptr(),
        out_TO.stride(0),
    )
    return out_TO


def logits_head(hidden_RH: Tensor, matrix_VH: PackedMatrix) -> Tensor:
    """Logits of the rows that sample, [R, V], float32."""
    return linear(hidden_RH, matrix_VH, None)


def unpack_rows(matrix: PackedMatrix, rows_R: Tensor) -> Tensor:
    """Some rows of the matrix as products see it, [R, I] float32.

    Raises IndexError for a row that there is not, and ValueError.
    """
    if rows_R.dim() != 1:
        raise ValueError(f"row numbers have one dimension, not {rows_R.dim()}")
    rows_R = rows_R.to("cpu", torch.int64).contiguous()
    num_rows = rows_R.shape[0]
    if num_rows:
        lowest, highest = (int(bound) for bound in rows_R.aminmax())
        if not 0 <= lowest <= highest < matrix.num_outputs:
            raise IndexError(f"rows {lowest} to {highest} of {matrix.num_outputs}")
    out_RI = torch.empty(num_rows, matrix.num_inputs)
    unpack = function("ft_unpack_rows", _UNPACK_ARGUMENTS)
    unpack(
        FORMATS[matrix.quantization],
        matrix.num_outputs,
        matrix.num_inputs,
        matrix.data.data_ptr(),
        rows_R.data_ptr(),
        num_rows,
        out_RI.data_ptr(),
    )
    return out_RI


def _check_rows(name: str, rows: Tensor, size: int) -> None:
    if rows.dtype != torch.float32 or rows.device.type != "cpu":
        raise TypeError(f"{name} is {rows.dtype} on {rows.device}, not float32 on the CPU")
    if rows.dim() != 2 or rows.shape[1] != size:
        raise ValueError(f"{name} is {tuple(rows.shape)}, not [rows, {size}]")
    if rows.stride(1) != 1 and size > 1:
        raise ValueError(f"the rows of {name} are not contiguous")


def _check_bias(bias_O: Tensor, num_outputs: int) -> None:
    if bias_O.dtype != torch.float32 or bias_O.device.type != "cpu":
        raise TypeError(f"the bias is {bias_O.dtype} on {bias_O.device}, not float32 on the CPU")
    if bias_O.shape != (num_outputs,) or not bias_O.is_contiguous():
        raise ValueError(f"the bias is {tuple(bias_O.shape)}, not [{num_outputs}]")
