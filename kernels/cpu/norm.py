"""Root-mean-square normalisation in C++, alone and with the residual addition before it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_contiguous, check_floats
from kernels.cpu.library import FLOAT, INT, POINTER, function

_NORM: Final = (POINTER, INT, INT, POINTER, FLOAT, POINTER)
_ADD_NORM: Final = (POINTER, POINTER, INT, INT, POINTER, FLOAT, POINTER)


def rms_norm(x_XC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    size = _check_weight(x_XC, weight_C)
    check_floats("x", x_XC)
    x_XC = x_XC.contiguous()
    out_XC = torch.empty_like(x_XC)
    num_rows = x_XC.numel() // size
    norm = function("ft_rms_norm", _NORM)
    norm(x_XC.data_ptr(), num_rows, size, weight_C.data_ptr(), eps, out_XC.data_ptr())
    return out_XC


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Adds x to `residual_TH` in place and returns the sum, normalised."""
    size = _check_weight(residual_TH, weight_H)
    check_contiguous("x", x_TH, torch.float32)
    check_contiguous("residual", residual_TH, torch.float32)
    if x_TH.shape != residual_TH.shape:
        raise ValueError(f"x is {tuple(x_TH.shape)}, residual {tuple(residual_TH.shape)}")
    out_TH = torch.empty_like(x_TH)
    add_norm = function("ft_add_rms_norm", _ADD_NORM)
    add_norm(
        x_TH.data_ptr(),
        residual_TH.data_ptr(),
        x_TH.numel() // size,
        size,
        weight_H.data_ptr(),
        eps,
        out_TH.data_ptr(),
    )
    return out_TH


def _check_weight(x_XC: Tensor, weight_C: Tensor) -> int:
    check_contiguous("weight", weight_C, torch.float32)
    size = x_XC.shape[-1]
    if weight_C.shape != (size,):
        raise ValueError(f"a weight of {tuple(weight_C.shape)} for rows of {size}")
    return size
