"""The gated activation of the MLP in C++."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_contiguous
from kernels.cpu.library import INT, POINTER, function

_SILU_MUL: Final = (POINTER, INT, INT, POINTER)


def silu_mul(gate_up_TG: Tensor) -> Tensor:
    """silu(gate) * up, [T, F]; gate is the first half of G = 2F, up the second."""
    check_contiguous("gate and up", gate_up_TG, torch.float32)
    num_rows, size = gate_up_TG.shape
    if size % 2:
        raise ValueError(f"rows of {size} have no two halves")
    out_TF = gate_up_TG.new_empty((num_rows, size // 2))
    multiply = function("ft_silu_mul", _SILU_MUL)
    multiply(gate_up_TG.data_ptr(), num_rows, size // 2, out_TF.data_ptr())
    return out_TF
