"""Paged attention whose bits for a query depend on its position and its context alone.

    keys      |<- split 0 ->|<- split 1 ->|<- split 2 ->|     SPLIT_KEYS each, from position 0 on
    query p   |    seen     |  seen  p    |  weights 0  |
              sum of split 0 + sum of split 1 + 0             always in this order

A split that a query sees nothing of adds exact zeros, so it does not matter which splits a chunk's
other queries need. The largest score is the same in any order. Within a split every product has
one shape: queries come in tiles of proven heights (`row_tiles`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.row_tiles import RowTiles, fill_rows

SPLIT_KEYS = 128

# From this many elements on torch divides a call among threads, wherever that cuts; numbers beside
# a cut are computed by other instructions, and the last bit of an exp may be another one.
DIVIDED_FROM_ELEMENTS = 32768


class SplitAttention:
    """Letters beside those of `kernels.ops`: C splits, S keys of one, X rows of a tile (by query,
    then head of its group)."""

    def __init__(self, tiles: RowTiles) -> None:
        self._tiles = tiles

    def paged_attention(
        self,
        q_TND: Tensor,
        kv_cache_2BSKD: Tensor,
        query_start_loc_R1: Tensor,
        seq_lens_R: Tensor,
        block_table_RM: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """As `attention.paged_attention`; computed in float32."""
        out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        starts = query_start_loc_R1.tolist()
        for row, seq_len in enumerate(seq_lens_R.tolist()):
            start, end = starts[row], starts[row + 1]
            out_TND[start:end] = self._attend_one(
                q_TND[start:end] * scale,
                kv_cache_2BSKD,
                block_table_RM[row],
                seq_len,
                sliding_window,
            )
        return out_TND

    def _attend_one(
        self,
        q_QND: Tensor,
        kv_cache_2BSKD: Tensor,
        block_table_M: Tensor,
        seq_len: int,
        sliding_window: int | None,
    ) -> Tensor:
        num_queries, num_heads, head_dim = q_QND.shape
        first_query = seq_len - num_queries
        lowest_seen = 0 if sliding_window is None else first_query - sliding_window + 1
        first_split = max(0, lowest_seen) // SPLIT_KEYS
        end_split = -(-seq_len // SPLIT_KEYS)
        keys_L = torch.arange(first_split * SPLIT_KEYS, end_split * SPLIT_KEYS, device=q_QND.device)
        k_CKSD, v_CKSD = _gather(kv_cache_2BSKD, block_table_M, keys_L.clamp(max=seq_len - 1))

        num_kv_heads = k_CKSD.shape[1]
        group = num_heads // num_kv_heads
        q_QKGD = q_QND.float().view(num_queries, num_kv_heads, group, head_dim)
        q_KXD = q_QKGD.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        outs = []
        for start, stop, height in self._tiles.spans(q_KXD.shape[1]):
            rows_X1 = torch.arange(start, start + height, device=q_QND.device).unsqueeze(1)
            positions_X1 = (first_query + rows_X1 // group).clamp_(max=seq_len - 1)
            hidden_XL = keys_L > positions_X1
            if sliding_window is not None:
                hidden_XL |= keys_L <= positions_X1 - sliding_window
            tile_KXD = fill_rows(q_KXD[:, start:stop], height)
            outs.append(_attend_tile(tile_KXD, k_CKSD, v_CKSD, hidden_XL)[:, : stop - start])
        out_KXD = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        out_KQGD = out_KXD.reshape(num_kv_heads, num_queries, group, head_dim)
        return out_KQGD.transpose(0, 1).reshape(q_QND.shape)


def _gather(
    kv_cache_2BSKD: Tensor, block_table_M: Tensor, positions_L: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of those positions by split and head, [C, K, SPLIT_KEYS, D], float32.

    Positions past the end repeat the last one: finite numbers, to be weighted with 0.
    """
    block_size, num_kv_heads, head_dim = kv_cache_2BSKD.shape[2:]
    slots_L = block_table_M[positions_L // block_size] * block_size + positions_L % block_size
    heads_K1 = torch.arange(num_kv_heads, device=slots_L.device).unsqueeze(1)
    rows_CKS = slots_L.view(-1, 1, SPLIT_KEYS) * num_kv_heads + heads_K1
    kv_2XD = kv_cache_2BSKD.view(2, -1, head_dim).index_select(1, rows_CKS.flatten())
    k_CKSD, v_CKSD = kv_2XD.float().view(2, *rows_CKS.shape, head_dim).unbind(0)
    return k_CKSD, v_CKSD


def _attend_tile(q_KXD: Tensor, k_CKSD: Tensor, v_CKSD: Tensor, hidden_XL: Tensor) -> Tensor:
    """[K, X, D]; every row sees a key."""
    num_splits, num_rows = k_CKSD.shape[0], q_KXD.shape[1]
    q_CKXD = q_KXD.expand(num_splits, *q_KXD.shape)
    scores_CKXS = split_product(q_CKXD, k_CKSD.transpose(2, 3))
    hidden_CXS = hidden_XL.view(num_rows, num_splits, SPLIT_KEYS).transpose(0, 1)
    scores_CKXS.masked_fill_(hidden_CXS.unsqueeze(1), float("-inf"))
    scores_CKXS -= scores_CKXS.amax(dim=(0, 3), keepdim=True)
    num_undivided = DIVIDED_FROM_ELEMENTS // SPLIT_KEYS - 1
    for part in torch.split(scores_CKXS.view(-1, SPLIT_KEYS), num_undivided):
        part.exp_()
    weights_CKX1 = scores_CKXS.sum(dim=3, keepdim=True)
    sums_CKXD = split_product(scores_CKXS, v_CKSD)
    total_KX1, out_KXD = weights_CKX1[0], sums_CKXD[0]
    for split in range(1, num_splits):
        total_KX1 = total_KX1 + weights_CKX1[split]
        out_KXD = out_KXD + sums_CKXD[split]
    return out_KXD / total_KX1


def split_product(rows_CKXI: Tensor, matrices_CKIO: Tensor) -> Tensor:
    """[C, K, X, O]: one product of a fixed shape per split and head."""
    num_splits, num_heads, num_rows, _ = rows_CKXI.shape
    product = torch.bmm(rows_CKXI.flatten(0, 1), matrices_CKIO.flatten(0, 1))
    return product.view(num_splits, num_heads, num_rows, -1)
