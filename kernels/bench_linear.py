"""What the packed products reach: of memory's bandwidth for one row, of arithmetic for many.

Weights are cold, as in a step of a model: each call takes the next of many copies, together larger
than any cache. An operation (OP) is a multiplication or an addition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import set_num_threads
from kernels.cpu.linear import FORMATS, PackedMatrix, linear, pack_matrix

SHAPES: Final = ((960, 576), (3072, 576), (576, 1536), (49152, 576))  # SmolLM2-135M's, [O, I]
NUM_ROWS: Final = (1, 8, 32, 128, 512)
_COLD_BYTES: Final = 128 << 20
_SECONDS: Final = 0.3  # for each figure
_MIN_CALLS: Final = 5

Figures = dict[str, float]
Call = Callable[[], object]


def measure(num_threads: int) -> dict[str, Figures]:
    """By matrix and form: GB/s of weights for one row, and GOP/s for each number of rows."""
    set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    figures = {"memory": {"read_gb_s": _read_bandwidth()}}
    for num_outputs, num_inputs in SHAPES:
        weight_OI = torch.randn(num_outputs, num_inputs)
        shape = f"[{num_outputs}, {num_inputs}]"
        figures[f"torch float32 {shape}"] = _of_torch(weight_OI)
        for quantization in FORMATS:
            matrix = pack_matrix(weight_OI, quantization)
            figures[f"{quantization} {shape}"] = _of_packed(matrix)
    return figures


def _read_bandwidth() -> float:
    numbers = torch.ones(256 << 20, dtype=torch.float32)
    return numbers.nbytes / _median_seconds(cycle([numbers.sum])) * 1e-9


def _of_torch(weight_OI: Tensor) -> Figures:
    copies = [weight_OI.clone() for _ in range(_num_copies(weight_OI.nbytes))]

    def calls(x_TI: Tensor) -> Iterator[Call]:
        return cycle([lambda weight=weight: F.linear(x_TI, weight) for weight in copies])

    return _figures(weight_OI.shape[0], weight_OI.shape[1], weight_OI.nbytes, calls)


def _of_packed(matrix: PackedMatrix) -> Figures:
    num_bytes = matrix.data.nbytes
    copies = [_copy(matrix) for _ in range(_num_copies(num_bytes))]

    def calls(x_TI: Tensor) -> Iterator[Call]:
        out_TO = torch.empty(x_TI.shape[0], matrix.num_outputs)
        return cycle([lambda copy=copy: linear(x_TI, copy, None, out_TO) for copy in copies])

    return _figures(matrix.num_outputs, matrix.num_inputs, num_bytes, calls)


def _copy(matrix: PackedMatrix) -> PackedMatrix:
    """torch allocates to 64 bytes."""
    return PackedMatrix(
        matrix.quantization, matrix.num_outputs, matrix.num_inputs, matrix.data.clone()
    )


def _num_copies(num_bytes: int) -> int:
    return -(-_COLD_BYTES // num_bytes) + 1


def _figures(
    num_outputs: int, num_inputs: int, num_bytes: int, calls: Callable[[Tensor], Iterator[Call]]
) -> Figures:
    figures: Figures = {}
    for num_rows in NUM_ROWS:
        seconds = _median_seconds(calls(torch.randn(num_rows, num_inputs)))
        if num_rows == 1:
            figures["gb_s_1_row"] = num_bytes / seconds * 1e-9
        figures[f"gop_s_{num_rows}_rows"] = 2 * num_rows * num_outputs * num_inputs / seconds * 1e-9
    return figures


def _median_seconds(calls: Iterator[Call]) -> float:
    next(calls)()
    taken: list[float] = []
    while len(taken) < _MIN_CALLS or sum(taken) < _SECONDS:
        call = next(calls)
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)
