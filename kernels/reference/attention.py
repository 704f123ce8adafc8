"""Causal attention of a ragged batch over a paged KV cache.

One request at a time, so that no tensor ever spans the contexts of several:

    request r     | context: seq_lens[r] tokens, in the blocks of block_table[r] |
                  |                          | queries: the last of them         |
    window        |        (not seen)  |<------------- window ------------->|

A chunk's own keys come back from the cache like all others, so that a token sees the same bytes
whether its prefix was computed now or long ago.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention(
    q_TND: Tensor,
    kv_cache_2BSKD: Tensor,
    query_start_loc_R1: Tensor,
    seq_lens_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Returns [T, N, D]. Query head n reads KV head n // (N / K).

    Request r owns rows query_start_loc[r] to query_start_loc[r + 1]; they are the last tokens of
    its seq_lens[r]. A query at position p sees positions (p - sliding_window, p].
    """
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    starts = query_start_loc_R1.tolist()
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        start, end = starts[row], starts[row + 1]
        out_TND[start:end] = _attend_one(
            q_TND[start:end], kv_cache_2BSKD, block_table_RM[row], seq_len, scale, sliding_window
        )
    return out_TND


def _attend_one(
    q_QND: Tensor,
    kv_cache_2BSKD: Tensor,
    block_table_M: Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    block_size = kv_cache_2BSKD.shape[2]
    first_query = seq_len - q_QND.shape[0]
    first_seen = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
    first_block, num_blocks = first_seen // block_size, -(-seq_len // block_size)
    first_key = first_block * block_size

    block_ids = block_table_M[first_block:num_blocks]
    kv_2LKD = kv_cache_2BSKD.index_select(1, block_ids).flatten(1, 2)[:, : seq_len - first_key]
    k_KLD, v_KLD = kv_2LKD.to(q_QND.dtype).transpose(1, 2).unbind(0)
    mask_QL = _visible(first_query, first_key, seq_len, sliding_window, q_QND.device)
    out_1NQD = F.scaled_dot_product_attention(
        q_QND.transpose(0, 1).unsqueeze(0),
        k_KLD.unsqueeze(0),
        v_KLD.unsqueeze(0),
        attn_mask=mask_QL,
        scale=scale,
        enable_gqa=True,
    )
    return out_1NQD.squeeze(0).transpose(0, 1)


def _visible(
    first_query: int, first_key: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys each query may see, [Q, L]; None where one query sees all keys."""
    lowest_seen = first_key if sliding_window is None else first_query - sliding_window + 1
    if first_query == seq_len - 1 and lowest_seen <= first_key:
        return None
    queries_Q1 = torch.arange(first_query, seq_len, device=device).unsqueeze(1)
    keys_L = torch.arange(first_key, seq_len, device=device)
    visible_QL = keys_L <= queries_Q1
    if sliding_window is not None:
        visible_QL &= keys_L > queries_Q1 - sliding_window
    return visible_QL
