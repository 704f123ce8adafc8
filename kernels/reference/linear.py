"""Matrix products of the decoder: projections and the logits head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [T, O]."""
    return F.linear(x_TI, weight_OI, bias_O)


def logits_head(hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits of the rows that sample, [R, V], float32 whatever the weights are."""
    return F.linear(hidden_RH, weight_VH).float()
