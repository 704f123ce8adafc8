"""What the C++ kernels can read: the checks before an address leaves Python."""

from __future__ import annotations

import torch
from torch import Tensor


def check_floats(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless it is float32 on the CPU."""
    if tensor.dtype != torch.float32 or not tensor.is_cpu:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on the CPU")


def check_contiguous(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError for another dtype or device, ValueError for a tensor with gaps."""
    if tensor.dtype != dtype or not tensor.is_cpu:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, not {dtype} on the CPU")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: {tuple(tensor.stride())}")


def check_heads(name: str, x_TXD: Tensor) -> None:
    """[tokens, heads, D], a token's numbers side by side; tokens may have others between them."""
    check_floats(name, x_TXD)
    if x_TXD.dim() != 3:
        raise ValueError(f"{name} is {tuple(x_TXD.shape)}, not [tokens, heads, head size]")
    head_size = x_TXD.shape[2]
    if x_TXD.stride(2) != 1 or (x_TXD.shape[1] > 1 and x_TXD.stride(1) != head_size):
        raise ValueError(f"the heads of a token of {name} are not contiguous")


def check_cache(kv_cache_2BSKD: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """One layer's cache, for heads of those sizes."""
    if kv_cache_2BSKD.dtype not in (torch.float16, torch.float32):
        raise TypeError(f"the KV cache is {kv_cache_2BSKD.dtype}, not float16 or float32")
    if kv_cache_2BSKD.dim() != 5 or not kv_cache_2BSKD.is_contiguous():
        raise ValueError(f"not one layer's cache: {tuple(kv_cache_2BSKD.shape)}")
    if kv_cache_2BSKD.shape[0] != 2 or kv_cache_2BSKD.shape[3:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"a cache of {tuple(kv_cache_2BSKD.shape)} for {num_kv_heads} heads of {head_dim}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads for {num_kv_heads} KV heads")
