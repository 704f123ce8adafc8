"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TG: Tensor) -> Tensor:
    """silu(gate) * up, [T, F]; gate is the first half of G = 2F, up the second."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
