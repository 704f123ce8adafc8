"""Paged attention in C++: the reference's results, and the same bits in whatever company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.attention import paged_attention
from kernels.cpu.build import machine_forms
from kernels.cpu.library import FORM_VARIABLE, set_num_threads
from kernels.reference.attention import paged_attention as reference_attention
from tests.kernels.paged_requests import Heads, PagedRequests, Projections, Share

WINDOWS = (None, 1, 5, 16, 17, 100, 300)
# Odd ones, one KV head for each query head and for many, more than a tile takes.
HEADS = (Heads(3, 3, 2), Heads(6, 6, 8), Heads(9, 3, 64), Heads(8, 1, 80), Heads(128, 1, 16))
# Decodes, cold prompts, chunks of a longer context, and a context's last partition cut anywhere.
SHARES: tuple[Share, ...] = (
    (0, 0, 1),
    (1, 16, 17),
    (2, 0, 40),
    (3, 250, 263),
    (4, 699, 700),
    (4, 600, 700),
    (3, 7, 9),
)
CONTEXTS = (1, 17, 40, 300, 700)


@pytest.fixture(params=machine_forms(), autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    form: str = request.param
    monkeypatch.setenv(FORM_VARIABLE, form)
    torch.manual_seed(11)
    return form


@pytest.fixture
def restored_num_threads() -> Iterator[None]:
    yield
    set_num_threads(1)


def requests_of(contexts: Sequence[int], heads: Heads) -> list[Projections]:
    return [Projections.random(context, heads) for context in contexts]


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("heads", HEADS)
def test_results_are_the_references(heads: Heads, block_size: int, dtype: torch.dtype) -> None:
    paged = PagedRequests(requests_of(CONTEXTS, heads), block_size, dtype)
    for window in WINDOWS:
        got = paged.attend(SHARES, window)
        want = paged.attend_with(reference_attention, SHARES, window)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_scores_far_apart_and_all_alike() -> None:
    heads = Heads(2, 1, 16)
    wild, alike = requests_of([90, 90], heads)
    wild.qkv_LXD[:, :3] *= 60
    alike.qkv_LXD[:, 2] = 1.0  # every key
    paged = PagedRequests([wild, alike], 16)
    shares = ((0, 0, 90), (1, 89, 90))
    got = paged.attend(shares)
    want = paged.attend_with(reference_attention, shares, None)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 17, 260])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 4, 20)])
def test_a_token_has_the_same_bits_in_any_chunk(
    heads: Heads, window: int | None, block_size: int
) -> None:
    paged = PagedRequests(requests_of([560], heads), block_size, torch.float16)
    (whole,) = paged.attend([(0, 0, 560)], window)
    for cuts in ([0, 1, 2, 3, 560], [0, 100, 103, 256, 257, 300, 560], [0, 5, 511, 513, 514, 560]):
        shares = [(0, start, end) for start, end in pairwise(cuts)]
        alone = [paged.attend([share], window)[0] for share in shares]
        assert_same_bits([torch.cat(alone)], [whole])
        assert_same_bits([torch.cat(paged.attend(shares, window))], [whole])
    decoded = [paged.attend([(0, token, token + 1)], window)[0] for token in (0, 15, 255, 256, 559)]
    assert_same_bits([torch.cat(decoded)], [whole[[0, 15, 255, 256, 559]]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_request_has_the_same_bits_in_any_batch_and_in_other_blocks(dtype: torch.dtype) -> None:
    requests = requests_of(CONTEXTS, Heads(9, 3, 64))
    paged = PagedRequests(requests, 16, dtype)
    alone = [paged.attend([share])[0] for share in SHARES]
    assert_same_bits(paged.attend(SHARES), alone)
    assert_same_bits(paged.attend(SHARES[::-1]), alone[::-1])
    assert_same_bits(PagedRequests(requests, 16, dtype).attend(SHARES), alone)
    assert_same_bits(PagedRequests(requests, 8, dtype).attend(SHARES), alone)


@pytest.mark.usefixtures("restored_num_threads")
@pytest.mark.parametrize("window", [None, 300])
def test_bits_do_not_depend_on_the_number_of_threads(window: int | None) -> None:
    paged = PagedRequests(requests_of([1500, *CONTEXTS], Heads(9, 3, 64)), 16)
    steps: tuple[list[Share], ...] = (
        [(0, 1499, 1500)],  # the partitions of one context, in all threads
        [(0, 1400, 1500)],
        [(1 + row, start, end) for row, start, end in SHARES],
        [(0, 1300, 1500), *[(5, token, token + 1) for token in range(650, 700)]],
    )
    want: list[list[Tensor]] = []
    for num_threads in (1, 2, 3, 8):
        set_num_threads(num_threads)
        got = [paged.attend(shares, window) for shares in steps]
        want = want or got
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("block_size", [4, 16])
def test_what_is_not_finite_hurts_only_those_who_see_it(block_size: int) -> None:
    heads, bad = Heads(6, 2, 16), 130
    for first_bad_head in (6, 8):  # keys, values
        (request,) = requests_of([200], heads)
        want = PagedRequests([request], block_size).attend([(0, 0, 200)])[0]
        request.qkv_LXD[bad, first_bad_head : first_bad_head + 2] = float("nan")
        got = PagedRequests([request], block_size).attend([(0, 0, 200)])[0]
        assert_same_bits([got[:bad]], [want[:bad]])
        assert got[bad:].isnan().all()


def test_a_query_that_is_not_finite_hurts_no_other() -> None:
    (request,) = requests_of([64], Heads(6, 2, 16))
    want = PagedRequests([request], 16).attend([(0, 0, 64)])[0]
    request.qkv_LXD[10, :6] = float("nan")
    request.qkv_LXD[11, :6] = float("inf")
    got = PagedRequests([request], 16).attend([(0, 0, 64)])[0]
    assert got[10].isnan().all()
    others = [token for token in range(64) if token not in (10, 11)]
    assert_same_bits([got[others]], [want[others]])


def test_what_lies_before_the_window_may_be_gone() -> None:
    (request,) = requests_of([300], Heads(6, 2, 16))
    for block_size in (4, 16):
        paged = PagedRequests([request], block_size)
        (want,) = paged.attend([(0, 290, 300)], 20)
        table = paged.block_tables[0]
        paged.cache[:, table[: 271 // block_size].long()] = float("nan")
        assert_same_bits(paged.attend([(0, 290, 300)], 20), [want])


@st.composite
def ragged_steps(draw: st.DrawFn) -> tuple[list[int], list[Share]]:
    contexts = draw(st.lists(st.integers(1, 700), min_size=1, max_size=5))
    shares = []
    for row, context in enumerate(contexts):
        start = draw(st.one_of(st.just(context - 1), st.integers(0, context - 1)))
        end = draw(st.integers(start + 1, min(context, start + 150)))
        shares.append((row, start, end))
    return contexts, shares


@settings(max_examples=25)
@given(
    step=ragged_steps(),
    window=st.sampled_from(WINDOWS),
    block_size=st.sampled_from((1, 7, 16, 64)),
    heads=st.sampled_from((Heads(2, 2, 8), Heads(9, 3, 20), Heads(4, 1, 64))),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
def test_any_step(
    step: tuple[list[int], list[Share]],
    window: int | None,
    block_size: int,
    heads: Heads,
    dtype: torch.dtype,
) -> None:
    contexts, shares = step
    paged = PagedRequests(requests_of(contexts, heads), block_size, dtype)
    got = paged.attend(shares, window)
    want = paged.attend_with(reference_attention, shares, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for share, rows in zip(shares, got, strict=True):
        assert_same_bits(paged.attend([share], window), [rows])


def test_arguments_that_do_not_fit_are_refused() -> None:
    heads = Heads(4, 2, 8)
    q = torch.randn(3, 4, 8)
    cache = torch.zeros(2, 5, 16, heads.kv, heads.size)
    starts, lengths = torch.tensor([0, 3]).int(), torch.tensor([3]).int()
    table = torch.zeros(1, 1, dtype=torch.int32)

    def attend(
        q: Tensor = q,
        cache: Tensor = cache,
        starts: Tensor = starts,
        lengths: Tensor = lengths,
        window: int | None = None,
    ) -> None:
        paged_attention(q, cache, starts, lengths, table, 0.3, window)

    attend()
    for wrong in (q.double(), q.half()):
        with pytest.raises(TypeError):
            attend(q=wrong)
    with pytest.raises(TypeError):
        attend(cache=cache.bfloat16())
    with pytest.raises(TypeError):
        attend(starts=starts.long())
    for window in (0, -1):
        with pytest.raises(ValueError, match="window"):
            attend(window=window)
    with pytest.raises(ValueError, match="lengths"):
        attend(lengths=torch.tensor([3, 3]).int())
    with pytest.raises(ValueError, match="contiguous"):
        attend(q=torch.randn(3, 8, 4).transpose(1, 2))
    with pytest.raises(ValueError, match="cache"):
        attend(q=torch.randn(3, 4, 6))
    with pytest.raises(ValueError, match="query heads"):
        attend(q=torch.randn(3, 3, 8))
