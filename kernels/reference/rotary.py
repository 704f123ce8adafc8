"""Rotary position embedding, and the write of a step's keys and values into the cache."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_cache_write(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PD: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    kv_cache_2BSKD: Tensor,
) -> None:
    """Rotates q in place; writes rotated k, and v, into the slots of one layer's cache.

    Dimension i is paired with i + D/2. `cos_sin_PD` holds, by position, D/2 cosines and then D/2
    sines. A slot is block * block_size + offset; slots of one call are distinct.
    """
    cos_T1E, sin_T1E = cos_sin_PD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    q_TND.copy_(_rotate(q_TND, cos_T1E, sin_T1E))
    k_cache, v_cache = kv_cache_2BSKD.flatten(1, 2).unbind(0)  # [B * S, K, D] each
    k_cache.index_copy_(0, slot_mapping_T, _rotate(k_TKD, cos_T1E, sin_T1E).to(k_cache.dtype))
    v_cache.index_copy_(0, slot_mapping_T, v_TKD.to(v_cache.dtype))


def _rotate(x_TXD: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    low, high = x_TXD.chunk(2, dim=-1)
    return torch.cat((low * cos_T1E - high * sin_T1E, high * cos_T1E + low * sin_T1E), dim=-1)
