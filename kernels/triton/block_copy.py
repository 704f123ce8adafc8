"""Copies of whole blocks within the KV cache, in Triton."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import check_contiguous

_PROGRAM_NUMBERS: Final = 4096


def copy_blocks(kv_cache_L2BSKD: Tensor, sources_C: Tensor, destinations_C: Tensor) -> None:
    """In every layer, keys and values: block `destinations_C[i]` becomes `sources_C[i]`.

    Destinations are distinct, and none is a source. Slots never written may be copied too. Blocks
    that there are not are not noticed.
    """
    check_contiguous("the cache", kv_cache_L2BSKD)
    check_contiguous("sources", sources_C)
    check_contiguous("destinations", destinations_C)
    if len(sources_C) != len(destinations_C):
        raise ValueError(f"{len(sources_C)} sources for {len(destinations_C)} destinations")
    num_pools = kv_cache_L2BSKD.shape[0] * kv_cache_L2BSKD.shape[1]
    block_numbers = kv_cache_L2BSKD.stride(2)
    _copy_kernel[(len(sources_C), num_pools, triton.cdiv(block_numbers, _PROGRAM_NUMBERS))](
        kv_cache_L2BSKD,
        sources_C,
        destinations_C,
        kv_cache_L2BSKD.stride(1),
        BLOCK_NUMBERS=block_numbers,
        NUMBERS=_PROGRAM_NUMBERS,
        enable_fp_fusion=False,
    )


@triton.jit
def _copy_kernel(
    cache_ptr,
    sources_ptr,
    destinations_ptr,
    stride_pool,
    BLOCK_NUMBERS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    pool_ptr = cache_ptr + tl.program_id(1).to(tl.int64) * stride_pool
    source = tl.load(sources_ptr + tl.program_id(0)).to(tl.int64)
    destination = tl.load(destinations_ptr + tl.program_id(0)).to(tl.int64)
    numbers = tl.program_id(2) * NUMBERS + tl.arange(0, NUMBERS)
    is_there = numbers < BLOCK_NUMBERS
    block = tl.load(pool_ptr + source * BLOCK_NUMBERS + numbers, mask=is_there)
    tl.store(pool_ptr + destination * BLOCK_NUMBERS + numbers, block, mask=is_there)
