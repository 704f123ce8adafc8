"""How large the pool of KV blocks is, and the tensor itself.

bytes per block = layers * 2 * block_size * kv_heads * head_dim * element size
blocks          = the number asked for, else (memory asked for or found) / bytes per block
memory found    = what the device leaves: `ComputeDevice.kv_cache_bytes`
max_model_len   = the smallest of the model's, the one asked for, and blocks * block_size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_service.config import CacheConfig
from engine_service.model_error import ModelError
from engine_service.models.config import DecoderConfig

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int
    max_model_len: int  # tokens, effective
    weight_bytes: int

    def __str__(self) -> str:
        num_tokens = self.num_blocks * self.block_size
        return (
            f"Weights: {self.weight_bytes / _GIB:.2f} GiB. "
            f"KV cache: {self.num_blocks} blocks x {self.block_size} tokens = {num_tokens} tokens, "
            f"{self.bytes_per_block // self.block_size} bytes a token, "
            f"{self.num_blocks * self.bytes_per_block / _GIB:.2f} GiB; max_model_len "
            f"{self.max_model_len}, {num_tokens / self.max_model_len:.1f} requests of that length"
        )


def plan_kv_cache(
    model: DecoderConfig,
    cache: CacheConfig,
    asked_max_model_len: int | None,
    dtype: torch.dtype,
    weight_bytes: int,
    find_bytes: Callable[[], int],
) -> KVCachePlan:
    """`find_bytes`: asked where no size is set. Raises ModelError when not even one block fits."""
    if cache.block_size < 1:
        raise ModelError("block_size must be at least 1.")
    if asked_max_model_len is not None and asked_max_model_len < 1:
        raise ModelError("max_model_len must be at least 1.")
    kv_heads_size = model.num_kv_heads * model.head_dim
    bytes_per_block = model.num_layers * 2 * cache.block_size * kv_heads_size * dtype.itemsize
    num_blocks = cache.num_blocks
    if num_blocks is None:
        num_bytes = cache.kv_cache_memory_bytes
        if num_bytes is None:
            num_bytes = find_bytes()
        num_blocks = num_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelError(
            f"The KV cache has no room for one block of {bytes_per_block} bytes; "
            "raise kv_cache_memory_bytes, or gpu_memory_utilization on CUDA."
        )
    max_model_len = min(
        model.max_position_embeddings,
        asked_max_model_len or model.max_position_embeddings,
        num_blocks * cache.block_size,
    )
    return KVCachePlan(num_blocks, cache.block_size, bytes_per_block, max_model_len, weight_bytes)


def allocate_kv_cache(
    model: DecoderConfig, plan: KVCachePlan, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[layers, 2, blocks + 1, block_size, kv_heads, head_dim]; keys are [:, 0], values [:, 1]. The
    last block is no request's: rows that fill up a batch write there.

    Left uninitialised: on a CPU a page becomes resident when its block is first written, and
    attention reads only slots that were written.
    """
    shape = (
        model.num_layers,
        2,
        plan.num_blocks + 1,
        plan.block_size,
        model.num_kv_heads,
        model.head_dim,
    )
    return torch.empty(shape, dtype=dtype, device=device)
