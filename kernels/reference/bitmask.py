"""Grammar masks over logits."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_bitmask(logits_RV: Tensor, rows_G: Tensor, bitmask_GW: Tensor) -> None:
    """Sets to -inf, in place, every logit of the named rows whose bit is 0.

    Bit j of word w (int32) of bitmask row g is token 32 * w + j of logits row rows_G[g];
    W = ceil(V / 32), surplus bits of the last word are ignored. Rows are distinct.
    """
    shifts_32 = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    bits_GW32 = bitmask_GW.unsqueeze(-1).bitwise_right_shift(shifts_32).bitwise_and(1)
    forbidden_GV = bits_GW32.flatten(1)[:, : logits_RV.shape[1]] == 0
    logits_RV[rows_G] = logits_RV[rows_G].masked_fill(forbidden_GV, float("-inf"))
