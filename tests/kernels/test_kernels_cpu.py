"""The row by row ops in C++ against the reference; products and attention have their own files."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu.activation import silu_mul
from kernels.cpu.block_copy import copy_blocks
from kernels.cpu.build import machine_forms
from kernels.cpu.library import FORM_VARIABLE, set_num_threads
from kernels.cpu.norm import add_rms_norm, rms_norm
from kernels.cpu.rotary import rotary_cache_write
from kernels.reference.activation import silu_mul as reference_silu_mul
from kernels.reference.block_copy import copy_blocks as reference_copy_blocks
from kernels.reference.norm import add_rms_norm as reference_add_rms_norm
from kernels.reference.norm import rms_norm as reference_rms_norm
from kernels.reference.rotary import rotary_cache_write as reference_rotary_cache_write
from tests.kernels.paged_requests import Heads, PagedRequests, Projections

SIZES = (1, 7, 8, 9, 31, 32, 33, 64, 576)


@pytest.fixture(params=machine_forms(), autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    form: str = request.param
    monkeypatch.setenv(FORM_VARIABLE, form)
    torch.manual_seed(11)
    return form


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    num_threads: int = request.param
    set_num_threads(num_threads)
    yield num_threads
    set_num_threads(1)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int) -> None:
    weight = torch.randn(size)
    for shape in ((0, size), (1, size), (5, size), (4, 3, size)):
        x = torch.randn(shape) * 3
        got = rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(got, reference_rms_norm(x, weight, 1e-5))
    heads = torch.randn(4, 5, size)[:, 1:3]  # as those of a fused projection
    torch.testing.assert_close(
        rms_norm(heads, weight, 1e-5), reference_rms_norm(heads, weight, 1e-5)
    )


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_keeps_the_sum(size: int) -> None:
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    want_residual = residual.clone()
    want = reference_add_rms_norm(x, want_residual, weight, 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-6), want)
    assert torch.equal(residual, want_residual)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(size: int) -> None:
    gate_up = torch.randn(5, 2 * size) * 5
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    torch.testing.assert_close(silu_mul(gate_up), reference_silu_mul(gate_up))


@pytest.mark.usefixtures("num_threads")
def test_rows_are_computed_for_themselves() -> None:
    x, weight = torch.randn(300, 577), torch.randn(577)
    gate_up = torch.randn(300, 2 * 577)
    normed, gated = rms_norm(x, weight, 1e-5), silu_mul(gate_up)
    for row in (0, 150, 299):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], gated[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_row_that_is_not_finite_hurts_no_other(bad: float) -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    want_normed, want_gated = rms_norm(x, weight, 1e-5), silu_mul(x)
    x[1, 5] = bad
    normed, gated = rms_norm(x, weight, 1e-5), silu_mul(x)
    for row in (0, 2):
        assert torch.equal(normed[row], want_normed[row])
        assert torch.equal(gated[row], want_gated[row])
    if math.isnan(bad):
        assert normed[1].isnan().all()
        assert gated[1, 5].isnan()


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("heads", [Heads(1, 1, 2), Heads(3, 1, 6), Heads(9, 3, 64)])
def test_rotary_is_the_references(heads: Heads, block_size: int, dtype: torch.dtype) -> None:
    """What was written shows in attention, which alone knows the layout."""
    num_tokens, half = 40, heads.size // 2
    angles = torch.rand(2000, half) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(2000, (num_tokens,))
    slots = torch.randperm(num_tokens + 9)[:num_tokens]
    q, k, v = Projections.random(num_tokens, heads).split()
    want_q = q.clone()
    num_blocks = -(-(num_tokens + 9) // block_size)
    cache = torch.full((2, num_blocks, block_size, heads.kv, heads.size), 99.0, dtype=dtype)
    want_cache = cache.clone()
    reference_rotary_cache_write(want_q, k, v, table, positions, slots, want_cache)
    rotary_cache_write(q, k, v, table, positions, slots, cache)
    torch.testing.assert_close(q, want_q)
    got_keys, got_values = keys_and_values(cache)
    want_keys, want_values = want_cache
    torch.testing.assert_close(got_keys, want_keys)
    assert torch.equal(got_values, want_values)


def keys_and_values(cache_2BSKD: Tensor) -> tuple[Tensor, Tensor]:
    """In the reference's order, [B, S, K, D] each; the layout is drawn in csrc/batch.h."""
    keys, values = cache_2BSKD
    num_blocks, block_size, num_heads, head_dim = keys.shape
    keys_BKDS = keys.reshape(num_blocks, num_heads, head_dim, block_size)
    values_BKSD = values.reshape(num_blocks, num_heads, block_size, head_dim)
    return keys_BKDS.permute(0, 3, 1, 2), values_BKSD.permute(0, 2, 1, 3)


def test_a_context_of_one_token_is_its_value() -> None:
    request = Projections.random(1, Heads(6, 2, 8))
    (out,) = PagedRequests([request], 16).attend([(0, 0, 1)])
    assert torch.equal(out[0], request.split()[2][0].repeat_interleave(3, dim=0))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copy_blocks(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 9, 4, 2, 6).to(dtype)
    cache[:, :, 7] = float("nan")  # a block never written
    want = cache.clone()
    sources, destinations = torch.tensor([4, 4, 7]), torch.tensor([0, 2, 8])
    reference_copy_blocks(want, sources, destinations)
    copy_blocks(cache, sources, destinations)
    assert torch.equal(cache.view(torch.int16), want.view(torch.int16))
    for bad in (-1, 9):
        with pytest.raises(IndexError):
            copy_blocks(cache, torch.tensor([4, bad]), torch.tensor([0, 1]))
    assert torch.equal(cache.view(torch.int16), want.view(torch.int16))


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight = torch.ones(8)
    with pytest.raises(TypeError):
        rms_norm(torch.ones(2, 8).half(), weight, 1e-5)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.ones(2, 9), weight, 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), weight, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(torch.ones(2, 8), torch.ones(8, 2).T, weight, 1e-5)
    with pytest.raises(ValueError, match="halves"):
        silu_mul(torch.ones(2, 9))
    with pytest.raises(ValueError, match="destinations"):
        copy_blocks(torch.ones(1, 2, 3, 4, 1, 2), torch.tensor([1]), torch.tensor([0, 2]))


def test_rotary_refuses_what_does_not_fit() -> None:
    q, k, v = Projections.random(3, Heads(4, 2, 8)).split()
    table, three = torch.ones(9, 8), torch.arange(3)
    cache = torch.zeros(2, 5, 16, 2, 8)
    with pytest.raises(ValueError, match="slots"):
        rotary_cache_write(q, k, v, table, three, torch.arange(4), cache)
    with pytest.raises(ValueError, match="table"):
        rotary_cache_write(q, k, v, torch.ones(9, 6), three, three, cache)
    with pytest.raises(ValueError, match="cache"):
        rotary_cache_write(q, k, v, table, three, three, torch.zeros(2, 5, 16, 1, 8))
    with pytest.raises(TypeError):
        rotary_cache_write(q, k, v, table, three.int(), three, cache)
