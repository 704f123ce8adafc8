"""What the Triton kernels can read: the checks before an address leaves Python."""

from __future__ import annotations

from torch import Tensor


def check_rows(name: str, x_XC: Tensor) -> None:
    """Raises ValueError unless the numbers of a row lie side by side."""
    if x_XC.shape[-1] > 1 and x_XC.stride(-1) != 1:
        raise ValueError(f"the rows of {name} have gaps: strides {tuple(x_XC.stride())}")


def check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} has gaps: strides {tuple(x.stride())}")


def check_cache(kv_cache_2BSKD: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """One layer's cache, for heads of those sizes."""
    check_contiguous("the cache", kv_cache_2BSKD)
    shape = kv_cache_2BSKD.shape
    if len(shape) != 5 or shape[0] != 2 or shape[3:] != (num_kv_heads, head_dim):
        raise ValueError(f"a cache of {tuple(shape)} for {num_kv_heads} KV heads of {head_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads for {num_kv_heads} KV heads")
