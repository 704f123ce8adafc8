"""The gated activation of the MLP in Triton."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_rows

_PROGRAM_NUMBERS: Final = 1024


def silu_mul(gate_up_TG: Tensor) -> Tensor:
    """silu(gate) * up, [T, F]; gate is the first half of G = 2F, up the second."""
    check_rows("gate and up", gate_up_TG)
    num_rows, size = gate_up_TG.shape
    if size % 2:
        raise ValueError(f"rows of {size} have no two halves")
    out_TF = gate_up_TG.new_empty((num_rows, size // 2))
    _silu_mul_kernel[(num_rows, triton.cdiv(size // 2, _PROGRAM_NUMBERS))](
        gate_up_TG,
        out_TF,
        gate_up_TG.stride(0),
        SIZE=size // 2,
        F=_PROGRAM_NUMBERS,
        enable_fp_fusion=False,
    )
    return out_TF


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride_row, SIZE: tl.constexpr, F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * F + tl.arange(0, F)
    is_there = columns < SIZE
    gate_ptrs = gate_up_ptr + row * stride_row + columns
    gate = tl.load(gate_ptrs, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, gate * tl.sigmoid(gate) * up, mask=is_there)
