"""Copies of whole blocks within the KV cache."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(kv_cache_L2BSKD: Tensor, sources_C: Tensor, destinations_C: Tensor) -> None:
    """In every layer, keys and values: block `destinations_C[i]` becomes `sources_C[i]`.

    Destinations are distinct, and none is a source. Slots never written may be copied too.
    """
    kv_cache_L2BSKD.index_copy_(2, destinations_C, kv_cache_L2BSKD.index_select(2, sources_C))
