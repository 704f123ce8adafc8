"""Copies of whole blocks within the KV cache, in C++."""

from __future__ import annotations

from ctypes import c_int
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_contiguous
from kernels.cpu.library import INT, POINTER, function

_COPY: Final = (POINTER, INT, INT, INT, POINTER, POINTER, INT)


def copy_blocks(kv_cache_L2BSKD: Tensor, sources_C: Tensor, destinations_C: Tensor) -> None:
    """In every layer, keys and values: block `destinations_C[i]` becomes `sources_C[i]`.

    Destinations are distinct, and none is a source. Slots never written may be copied too. Raises
    IndexError, having copied nothing, for a block that there is not.
    """
    check_contiguous("the cache", kv_cache_L2BSKD, kv_cache_L2BSKD.dtype)
    check_contiguous("sources", sources_C, torch.int64)
    check_contiguous("destinations", destinations_C, torch.int64)
    if len(sources_C) != len(destinations_C):
        raise ValueError(f"{len(sources_C)} sources for {len(destinations_C)} destinations")
    num_blocks = kv_cache_L2BSKD.shape[2]
    copy = function("ft_copy_blocks", _COPY, c_int)
    failed = copy(
        kv_cache_L2BSKD.data_ptr(),
        kv_cache_L2BSKD.shape[0] * kv_cache_L2BSKD.shape[1],
        num_blocks,
        kv_cache_L2BSKD.stride(2) * kv_cache_L2BSKD.itemsize,
        sources_C.data_ptr(),
        destinations_C.data_ptr(),
        len(sources_C),
    )
    if failed:
        raise IndexError(f"copies between blocks of a cache of {num_blocks}")
