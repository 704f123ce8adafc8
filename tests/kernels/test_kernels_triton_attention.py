"""Paged attention in Triton: the reference's results, and the same bits in whatever company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.reference.attention import paged_attention as reference_attention
from kernels.triton.attention import paged_attention
from kernels.triton.attention_splits import num_splits
from tests.kernels.paged_requests import Attention, Heads, PagedRequests, Projections, Share
from tests.kernels.test_kernels_reference import Attention as Batch
from tests.kernels.test_kernels_reference import attention_batch

SHARES: tuple[Share, ...] = ((0, 0, 1), (1, 16, 17), (2, 0, 40), (3, 250, 263), (3, 299, 300))
CONTEXTS = (1, 17, 40, 300)
SMALL = Heads(6, 2, 16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.fixture
def attention(device: torch.device) -> Attention:
    """From and to the CPU, where `PagedRequests` are."""

    def attend(
        q_TND: Tensor,
        kv_cache_2BSKD: Tensor,
        query_start_loc_R1: Tensor,
        seq_lens_R: Tensor,
        block_table_RM: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        return paged_attention(
            q_TND.to(device),
            kv_cache_2BSKD.to(device),
            query_start_loc_R1.to(device),
            seq_lens_R.to(device),
            block_table_RM.to(device),
            scale,
            sliding_window,
        ).cpu()

    return attend


def paged_requests(
    contexts: Sequence[int],
    heads: Heads,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedRequests:
    requests = [Projections.random(context, heads) for context in contexts]
    return PagedRequests(requests, block_size, dtype)


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def attend_batch(attention: Attention, batch: Batch, window: int | None = None) -> Tensor:
    return attention(
        batch.q_TND,
        batch.cache_2BSKD,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        0.3,
        window,
    )


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("window", [None, 20])
def test_chunks_and_decodes_beside_each_other(attention: Attention, window: int | None) -> None:
    paged = paged_requests(CONTEXTS, SMALL, block_size=7)
    got = paged.attend_with(attention, SHARES, window)
    want = paged.attend_with(reference_attention, SHARES, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize(
    "heads", [Heads(3, 3, 2), Heads(7, 1, 96), Heads(32, 2, 80), Heads(4, 1, 256), Heads(65, 1, 8)]
)
def test_results_are_the_references(
    attention: Attention, heads: Heads, block_size: int, dtype: torch.dtype
) -> None:
    paged = paged_requests(CONTEXTS, heads, block_size, dtype)
    for window in (None, 1, 100):
        got = paged.attend_with(attention, SHARES, window)
        want = paged.attend_with(reference_attention, SHARES, window)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(attention: Attention, dtype: torch.dtype) -> None:
    batch = attention_batch([(37, 5), (70, 1), (9, 9)], 4, 2, 16, block_size=16)
    batch = replace(
        batch, q_TND=batch.q_TND.to(dtype), cache_2BSKD=batch.cache_2BSKD.nan_to_num().to(dtype)
    )
    exact = replace(batch, q_TND=batch.q_TND.double(), cache_2BSKD=batch.cache_2BSKD.double())
    got = attend_batch(attention, batch)
    assert got.dtype == dtype
    want = attend_batch(reference_attention, exact)
    error = (got.double() - want).norm() / want.norm()
    assert error < (0.001 if dtype == torch.float16 else 0.01)


@pytest.mark.parametrize(
    ("num_keys", "splits"),
    [(1, 1), (256, 1), (257, 2), (8192, 32), (8193, 33), (9216, 33), (9217, 34), (131072, 152)],
)
def test_splits_cover_a_context(num_keys: int, splits: int) -> None:
    assert num_splits(num_keys) == splits


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300, 5000])
def test_a_context_of_short_and_long_splits(attention: Attention, window: int | None) -> None:
    paged = paged_requests([9500], Heads(2, 1, 16), block_size=64)
    shares = ((0, 9499, 9500), (0, 9210, 9220), (0, 8190, 8195), (0, 8192, 8193))
    got = paged.attend_with(attention, shares, window)
    want = paged.attend_with(reference_attention, shares, window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_scores_far_apart_and_all_alike(attention: Attention) -> None:
    heads = Heads(2, 1, 16)
    wild, alike = (Projections.random(90, heads) for _ in range(2))
    wild.qkv_LXD[:, :3] *= 60
    alike.qkv_LXD[:, 2] = 1.0  # every key
    paged = PagedRequests([wild, alike], 16)
    shares = ((0, 80, 90), (1, 89, 90))
    got = paged.attend_with(attention, shares, None)
    want = paged.attend_with(reference_attention, shares, None)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_requests_without_a_context_read_nothing_and_give_zeros(device: torch.device) -> None:
    """As in a captured graph with fewer requests than it was captured for."""
    cache = torch.full((2, 3, 16, 2, 16), float("nan"))
    cache[:, 1, :5] = torch.randn(2, 5, 2, 16)
    got = paged_attention(
        torch.randn(3, 4, 16).to(device),
        cache.to(device),
        torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device),
        torch.tensor([0, 5, 0], dtype=torch.int32, device=device),
        torch.tensor([[0], [1], [-1]], dtype=torch.int32, device=device),
        0.25,
        None,
    )
    assert (got[[0, 2]] == 0.0).all()
    assert got[1].isfinite().all() and (got[1] != 0.0).all()


def test_what_cannot_be_read_is_refused(attention: Attention) -> None:
    batch = attention_batch([(5, 2)], 4, 2, 16, block_size=16)
    with pytest.raises(ValueError, match="a window of 0"):
        attend_batch(attention, batch, window=0)
    with pytest.raises(ValueError, match="2 starts and 2 lengths for 1 requests"):
        attend_batch(attention, replace(batch, seq_lens=batch.seq_lens.repeat(2)))
    with pytest.raises(ValueError, match="3 query heads for 2 KV heads"):
        attend_batch(attention, replace(batch, q_TND=batch.q_TND[:, :3]))
    with pytest.raises(ValueError, match="rows of q have gaps"):
        attend_batch(attention, replace(batch, q_TND=batch.q_TND.transpose(1, 2)))


# ---------------------------------------------------------------- bits

in_order = pytest.mark.usefixtures("products_in_order")


@in_order
def test_a_decode_has_the_bits_of_a_chunk(attention: Attention) -> None:
    paged = paged_requests([300], SMALL, dtype=torch.float16)
    chunk = paged.attend_with(attention, [(0, 255, 300)], None)[0]
    for token in (255, 256, 299):
        decode = paged.attend_with(attention, [(0, token, token + 1)], None)
        assert_same_bits(decode, [chunk[token - 255 : token - 254]])


@in_order
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 17, 260])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(5, 1, 20), Heads(2, 2, 256)])
def test_a_token_has_the_same_bits_in_any_chunk(
    attention: Attention, heads: Heads, window: int | None
) -> None:
    paged = paged_requests([300], heads, dtype=torch.float16)
    (whole,) = paged.attend_with(attention, [(0, 0, 300)], window)
    for cuts in ([0, 1, 2, 3, 300], [0, 100, 103, 256, 257, 300], [0, 5, 255, 299, 300]):
        shares = [(0, start, end) for start, end in pairwise(cuts)]
        alone = [paged.attend_with(attention, [share], window)[0] for share in shares]
        assert_same_bits([torch.cat(alone)], [whole])
        assert_same_bits([torch.cat(paged.attend_with(attention, shares, window))], [whole])


@in_order
@pytest.mark.slow
def test_bits_of_short_and_long_splits(attention: Attention) -> None:
    paged = paged_requests([9500], Heads(2, 1, 16), block_size=64)
    shares = ((0, 9210, 9220), (0, 9499, 9500), (0, 8190, 8195), (0, 8192, 8193))
    together = paged.attend_with(attention, shares, None)
    assert_same_bits([paged.attend_with(attention, [share], None)[0] for share in shares], together)
    assert_same_bits(paged.attend_with(attention, [(0, 9214, 9215)], None), [together[0][4:5]])
    assert_same_bits([together[2][2:3]], [together[3]])


@in_order
@pytest.mark.slow
def test_a_request_has_the_same_bits_in_any_batch_and_in_other_blocks(
    attention: Attention,
) -> None:
    requests = [Projections.random(context, Heads(9, 3, 64)) for context in CONTEXTS]
    paged = PagedRequests(requests, 16)
    alone = [paged.attend_with(attention, [share], None)[0] for share in SHARES]
    assert_same_bits(paged.attend_with(attention, SHARES, None), alone)
    assert_same_bits(paged.attend_with(attention, SHARES[::-1], None), alone[::-1])
    for block_size in (16, 8):
        moved = PagedRequests(requests, block_size)
        assert_same_bits(moved.attend_with(attention, SHARES, None), alone)


@in_order
def test_bits_do_not_depend_on_how_many_programs_share_a_context(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = paged_requests([600], SMALL)
    shares = [(0, 599, 600), (0, 300, 301)]
    want = paged.attend_with(attention, shares, None)
    monkeypatch.setattr("kernels.triton.attention._SPLIT_PROGRAMS", 1)
    assert_same_bits(paged.attend_with(attention, shares, None), want)
