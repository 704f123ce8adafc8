"""How large the pool of KV blocks is, and the tensor itself.

bytes per block = layers * 2 * block_size * kv_heads * head_dim * element size
blocks          = the number asked for, else (memory asked for or found) / bytes per block
memory found    = CPU:  the smaller of 2 GiB and a quarter of what is available
                  CUDA: device * gpu_memory_utilization - held by others - weights
max_model_len   = the smallest of the model's, the one asked for, and blocks * block_size
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_service.config import CacheConfig
from engine_service.model_error import ModelError
from engine_service.models.config import DecoderConfig

_GIB = 1024**3
_DEFAULT_CPU_BYTES = 2 * _GIB
_CPU_SHARE_OF_AVAILABLE = 0.25


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
    device: torch.device,
    weight_bytes: int,
) -> KVCachePlan:
    """To be made before the weights are loaded. Raises ModelError when not even one block fits."""
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
            num_bytes = _bytes_found(device, weight_bytes, cache.gpu_memory_utilization)
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
    """[layers, 2, blocks, block_size, kv_heads, head_dim]; keys are [:, 0], values [:, 1].

    Left uninitialised: on a CPU a page becomes resident when its block is first written, and
    attention reads only slots that were written.
    """
    shape = (
        model.num_layers,
        2,
        plan.num_blocks,
        plan.block_size,
        model.num_kv_heads,
        model.head_dim,
    )
    return torch.empty(shape, dtype=dtype, device=device)


def cuda_bytes(total_bytes: int, free_bytes: int, weight_bytes: int, utilization: float) -> int:
    """What a device has for the KV cache, before the weights are on it; never negative."""
    held_by_others = total_bytes - free_bytes
    return max(0, int(total_bytes * utilization) - held_by_others - weight_bytes)


def _bytes_found(device: torch.device, weight_bytes: int, gpu_memory_utilization: float) -> int:
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cuda_bytes(total_bytes, free_bytes, weight_bytes, gpu_memory_utilization)
    return min(_DEFAULT_CPU_BYTES, int(_available_bytes() * _CPU_SHARE_OF_AVAILABLE))


def _available_bytes() -> int:
    """Memory that can be had without swapping: the machine's, or less where a cgroup limits it."""
    available = _meminfo_available_bytes()
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return available
    return min(available, max(0, limit - used))


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _DEFAULT_CPU_BYTES
