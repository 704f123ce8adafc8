"""The tiles of matrix products: which part of a product a program computes.

    y [T, O]    tiles of 64 rows by 32 to 128 outputs, each summed over all inputs in order

How high and wide tiles are, and by how many inputs a sum goes on, follows from the matrix and the
dtype alone, and no sum is shared between programs: a row's bits do not depend on how many rows
there are. Few rows take no longer for it: their time is that of reading the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton

_ROWS: Final = 64  # one warpgroup's matrix instruction on Hopper
_ENOUGH_PROGRAMS: Final = 128  # about a large GPU's multiprocessors, all of which are to read
_WIDTHS: Final = (128, 64)  # and where both are too few programs:
_NARROWEST: Final = 32

_HOPPER_SHARED_BYTES: Final = 228 * 1024  # of a multiprocessor
_PROGRAM_BYTES: Final = 1024  # of them, that are not a program's to use
_UNSTAGED_BYTES: Final = 24 * 1024  # of them, for what is not read ahead
_MOST_STAGES: Final = 6


@dataclass(frozen=True, slots=True)
class LinearTiles:
    rows: int
    outputs: int
    input_bytes: int  # of a row, by which a sum goes on; more where a step has few outputs to read

    @classmethod
    def of(cls, num_outputs: int) -> LinearTiles:
        fitting = (width for width in _WIDTHS if num_outputs >= width * _ENOUGH_PROGRAMS)
        outputs = next(fitting, _NARROWEST)
        return cls(_ROWS, outputs, 128 if outputs == _WIDTHS[0] else 256)

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int]:
        """Programs that read the same part of the matrix are neighbours."""
        return triton.cdiv(num_rows, self.rows), triton.cdiv(num_outputs, self.outputs)

    def num_stages(
        self, row_bytes: int, output_bytes: int, device: torch.device, widened_bytes: int = 0
    ) -> int:
        """How many steps of a sum are read ahead: as many as fit, which changes no sum.

        Bytes are those that a step has of a row, and of an output; `widened_bytes` those of an
        output once it has the rows' dtype, where it is read in another.
        """
        stage_bytes = self.rows * row_bytes + self.outputs * output_bytes
        most = (_shared_bytes(device) - _UNSTAGED_BYTES) // stage_bytes
        if self.outputs == _WIDTHS[0]:  # two programs are to fit on a multiprocessor of Hopper
            own_bytes = _HOPPER_SHARED_BYTES // 2 - _PROGRAM_BYTES - self.outputs * widened_bytes
            most = min(most, own_bytes // stage_bytes)
        return max(1, min(most, _MOST_STAGES))


def _shared_bytes(device: torch.device) -> int:
    """Of a multiprocessor; without a GPU, those that kernels are made for."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
