"""Triton's kernels that take each row for itself: norms, activation, rotation, copies of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.reference.activation import silu_mul as reference_silu_mul
from kernels.reference.block_copy import copy_blocks as reference_copy_blocks
from kernels.reference.norm import rms_norm as reference_rms_norm
from kernels.reference.rotary import rotary_cache_write as reference_rotary_cache_write
from kernels.triton.activation import silu_mul
from kernels.triton.block_copy import copy_blocks
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotary_cache_write

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of one rounding more or less; the interpreter cuts bfloat16 off instead of rounding it.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _tensors_on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        torch.manual_seed(5)
        yield


def assert_close(got: Tensor, want_double: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), want_double, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 576), (3, 3000), (70, 40), (7, 3, 24), (2, 3, 4, 5)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype and got.shape == shape
    assert_close(got, reference_rms_norm(x.double(), weight.double(), 1e-5))


def test_rms_norm_of_heads_that_are_views_of_one_buffer() -> None:
    qkv = torch.randn(40, 10, 32)
    weight = torch.randn(32)
    got = rms_norm(qkv[:, 6:8], weight, 1e-6)
    assert_close(got, reference_rms_norm(qkv[:, 6:8].double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(37, 90).to(dtype), torch.randn(37, 90).to(dtype)
    weight = torch.randn(90).to(dtype)
    total = x.double() + residual.double()
    got = add_rms_norm(x, residual, weight, 1e-6)
    assert_close(residual, total)
    assert torch.equal(got, rms_norm(residual, weight, 1e-6))


@pytest.mark.parametrize("size", [24, 576, 3000])
def test_a_normalised_row_has_the_same_bits_alone(size: int) -> None:
    x, weight = torch.randn(90, size), torch.randn(size)
    whole = rms_norm(x, weight, 1e-5)
    for row in (0, 41, 89):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5), whole[row : row + 1])


def test_a_norm_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="the rows of x have gaps"):
        rms_norm(torch.ones(4, 8).T, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"a weight of \(7,\) for rows of 8"):
        rms_norm(torch.ones(4, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(torch.ones(4, 8), torch.ones(3, 8), torch.ones(8), 1e-5)


# ---------------------------------------------------------------- activation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 160, 1500])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * size) * 4).to(dtype)
    assert_close(silu_mul(gate_up), reference_silu_mul(gate_up.double()))
    assert silu_mul(gate_up[:0]).shape == (0, size)


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 6), (4, 4, 64), (16, 1, 80), (2, 2, 256)]
)
def test_rotation_and_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    angles = torch.rand(50, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    positions, slots = torch.tensor([4, 0, 49, 7]), torch.tensor([7, 2, -1, 12])
    qkv = torch.randn(4, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    cache = torch.full((2, 5, 4, kv_heads, dim), float("nan"), dtype=dtype)
    k_before, v_before = k.clone(), v.clone()
    want_cache = torch.full(cache.shape, float("nan"), dtype=torch.float64)

    def reference(rows: Tensor, aim: Tensor) -> Tensor:
        turned = q[rows].double()
        keys, values, at = k[rows].double(), v[rows].double(), slots[rows].clamp(min=0)
        reference_rotary_cache_write(turned, keys, values, table.double(), positions[rows], at, aim)
        return turned

    reference(slots >= 0, want_cache)
    want_q = reference(slots >= -1, want_cache.clone())  # of all
    rotary_cache_write(q, k, v, table, positions, slots, cache)
    assert_close(q, want_q)
    assert torch.equal(k, k_before) and torch.equal(v, v_before)
    torch.testing.assert_close(
        cache.double(), want_cache, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True
    )


def test_a_cache_of_another_dtype_is_written() -> None:
    q, k, v = torch.randn(3, 1, 2, 8).unbind(0)
    table = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), dim=1)  # turns nothing
    cache = torch.zeros(2, 1, 4, 2, 8, dtype=torch.float16)
    rotary_cache_write(q, k, v, table, torch.tensor([0]), torch.tensor([3]), cache)
    assert torch.equal(cache[0, 0, 3], k[0].half()) and torch.equal(cache[1, 0, 3], v[0].half())
    assert not cache[:, 0, :3].any()


def test_a_rotation_refuses_what_it_cannot_read() -> None:
    q, k, v = torch.randn(3, 2, 2, 8).unbind(0)
    table, numbers = torch.ones(4, 8), torch.tensor([0, 1])
    cache = torch.zeros(2, 1, 4, 2, 8)
    with pytest.raises(ValueError, match="the cache has gaps"):
        rotary_cache_write(q, k, v, table, numbers, numbers, cache.transpose(2, 3))
    with pytest.raises(ValueError, match="for 2 KV heads of 8"):
        rotary_cache_write(q, k, v, table, numbers, numbers, cache[..., :4].contiguous())
    with pytest.raises(ValueError, match="1 positions, 2 slots"):
        rotary_cache_write(q, k, v, table, numbers[:1], numbers, cache)
    with pytest.raises(ValueError, match=r"a table of \(4, 6\)"):
        rotary_cache_write(q, k, v, table[:, :6].contiguous(), numbers, numbers, cache)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(4, 2, 6), (16, 3, 100)])
def test_copy_blocks(block: tuple[int, int, int], dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 7, *block).to(dtype)
    cache[:, :, 1] = float("nan")
    want = cache.clone()
    sources, destinations = torch.tensor([5, 1, 5]), torch.tensor([0, 4, 6])
    reference_copy_blocks(want, sources, destinations)
    copy_blocks(cache, sources, destinations)
    torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
    copy_blocks(cache, sources[:0], destinations[:0])
    with pytest.raises(ValueError, match="2 sources for 3 destinations"):
        copy_blocks(cache, sources[:2], destinations)
