"""Root-mean-square normalisation, alone and with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_XC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside."""
    x_float = x_XC.float()
    scale = torch.rsqrt(x_float.square().mean(dim=-1, keepdim=True) + eps)
    return (x_float * scale).to(x_XC.dtype) * weight_C


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Adds x to `residual_TH` in place and returns the sum, normalised."""
    residual_TH.add_(x_TH)
    return rms_norm(residual_TH, weight_H, eps)
