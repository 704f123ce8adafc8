"""Batch-invariant ops: the bits of a row, whatever the rows beside it and however they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops, batch_invariant_ops, reference_ops
from kernels.reference import batch_invariant
from kernels.reference.row_tiles import HEIGHTS, NotBatchInvariant, RowTiles, prove_tiles

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 3, 3, 64, 16
CONTEXT = 300
SHAPES = [(96, 64), (333, 576), (576, 1536)]  # of the matrices, [O, I]


@pytest.fixture(scope="module")
def matrices() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for shape in SHAPES]


@pytest.fixture(scope="module")
def ops(matrices: list[Tensor]) -> Ops[Tensor]:
    return batch_invariant_ops(matrices, KV_HEADS, HEAD_DIM)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(12)


# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize(
    ("num_rows", "spans"),
    [
        (0, [(0, 0, 8)]),
        (1, [(0, 1, 8)]),
        (9, [(0, 9, 16)]),
        (32, [(0, 32, 32)]),
        (70, [(0, 32, 32), (32, 64, 32), (64, 70, 8)]),
    ],
)
def test_spans_cover_all_rows_once(num_rows: int, spans: list[tuple[int, int, int]]) -> None:
    assert list(RowTiles((8, 16, 32)).spans(num_rows)) == spans


def test_heights_that_differ_are_not_used() -> None:
    def product(x_TI: Tensor) -> Tensor:
        return x_TI + (0.5 if x_TI.shape[0] > 32 else 0.0)

    row = torch.ones(1, 4)
    assert prove_tiles([([product], row)]).heights == tuple(h for h in HEIGHTS if h <= 32)


def test_a_product_that_depends_on_the_place_is_refused() -> None:
    def product(x_TI: Tensor) -> Tensor:
        return x_TI + torch.arange(x_TI.shape[0]).unsqueeze(1)

    with pytest.raises(NotBatchInvariant):
        prove_tiles([([product], torch.ones(1, 4))])


def test_attention_is_proven_for_several_counts_of_splits(
    matrices: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def depends_on_the_count(rows_CKXI: Tensor, matrices_CKIO: Tensor) -> Tensor:
        return rows_CKXI @ matrices_CKIO + (0.5 if len(rows_CKXI) == 3 else 0.0)

    monkeypatch.setattr(batch_invariant, "split_product", depends_on_the_count)
    with pytest.raises(NotBatchInvariant):
        batch_invariant_ops(matrices, KV_HEADS, HEAD_DIM)


# ---------------------------------------------------------------- rows


def test_plain_products_do_depend_on_the_number_of_rows(matrices: list[Tensor]) -> None:
    """Or nothing here proves anything."""
    x_TI, weight_OI = torch.randn(40, 576), matrices[1]
    whole = reference_ops().linear(x_TI, weight_OI, None)
    alone = [reference_ops().linear(row, weight_OI, None) for row in torch.split(x_TI, 1)]
    assert not torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("index", range(len(SHAPES)))
@pytest.mark.parametrize("cuts", [[1] * 40, [40], [3, 30, 7], [17, 23]])
def test_products_row_by_row(
    ops: Ops[Tensor], matrices: list[Tensor], index: int, cuts: list[int]
) -> None:
    weight_OI = matrices[index]
    bias_O = torch.randn(weight_OI.shape[0])
    x_TI = torch.randn(200, weight_OI.shape[1])
    whole = ops.linear(x_TI, weight_OI, bias_O)
    parts = [ops.linear(part, weight_OI, bias_O) for part in torch.split(x_TI[100:140], cuts)]
    assert torch.equal(torch.cat(parts), whole[100:140])
    torch.testing.assert_close(whole, x_TI @ weight_OI.T + bias_O, rtol=1e-4, atol=1e-4)
    assert ops.linear(x_TI[:0], weight_OI, bias_O).shape == (0, len(weight_OI))
    heads = [ops.logits_head(part, weight_OI) for part in torch.split(x_TI[100:140], cuts)]
    assert torch.equal(torch.cat(heads), ops.logits_head(x_TI, weight_OI)[100:140])


def test_a_bias_is_no_part_of_the_product(
    ops: Ops[Tensor], matrices: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are proven without one, and a library computes those with one by other code."""

    def other_code_with_a_bias(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        y_TO = x_TI @ weight_OI.T
        return y_TO if bias_O is None else y_TO + bias_O + len(x_TI)

    weight_OI = matrices[1]
    x_TI, bias_O = torch.randn(40, weight_OI.shape[1]), torch.randn(len(weight_OI))
    monkeypatch.setattr(batch_invariant, "linear", other_code_with_a_bias)
    expected = ops.linear(x_TI, weight_OI, None) + bias_O
    assert torch.equal(ops.linear(x_TI, weight_OI, bias_O), expected)
    assert torch.equal(ops.linear(x_TI[7:8], weight_OI, bias_O), expected[7:8])


@pytest.mark.parametrize("inner", [160, 333, 1536])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_activation_row_by_row(ops: Ops[Tensor], inner: int, num_threads: int) -> None:
    gate_up_TG = torch.randn(257, 2 * inner) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = ops.silu_mul(gate_up_TG)
        rows = torch.cat([ops.silu_mul(row) for row in torch.split(gate_up_TG, 1)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, rows)
    torch.testing.assert_close(whole, reference_ops().silu_mul(gate_up_TG))


# ---------------------------------------------------------------- attention


class Context:
    """One request's keys and values, in blocks of a random order; what isn't its own is NaN."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        num_blocks = -(-CONTEXT // BLOCK_SIZE)
        self.blocks = torch.randperm(num_blocks + 5)[:num_blocks].int()
        shape = (2, num_blocks + 5, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        self.values = torch.randn(2, CONTEXT, KV_HEADS, HEAD_DIM).to(dtype)
        self.queries = torch.randn(CONTEXT, KV_HEADS * GROUP, HEAD_DIM)

    def write(self, end: int) -> None:
        slots = torch.arange(end)
        where = self.blocks[slots // BLOCK_SIZE].long(), slots % BLOCK_SIZE
        for part in (0, 1):
            self.cache[part][where] = self.values[part, :end]

    def attend(self, ops: Ops[Tensor], start: int, end: int, window: int | None) -> Tensor:
        self.write(end)
        return ops.paged_attention(
            self.queries[start:end],
            self.cache,
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            self.blocks[: -(-end // BLOCK_SIZE)].unsqueeze(0),
            HEAD_DIM**-0.5,
            window,
        )


@pytest.mark.parametrize("window", [None, 20, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cuts", [[1] * CONTEXT, [128, 128, 44], [5, 123, 1, 170, 1], [299, 1]])
def test_attention_in_any_chunks(
    ops: Ops[Tensor], window: int | None, dtype: torch.dtype, cuts: list[int]
) -> None:
    context = Context(dtype)
    whole = context.attend(ops, 0, CONTEXT, window)
    torch.testing.assert_close(whole, context.attend(reference_ops(), 0, CONTEXT, window))
    context.cache.fill_(float("nan"))  # later keys aren't there yet
    start = 0
    for count in cuts:
        chunk = context.attend(ops, start, start + count, window)
        assert torch.equal(chunk, whole[start : start + count]), (start, count)
        start += count


def test_attention_beside_others(ops: Ops[Tensor]) -> None:
    context = Context()
    whole = context.attend(ops, 0, CONTEXT, None)
    rows = [(0, 7), (280, 300), (99, 100)]  # three requests over one context
    together = ops.paged_attention(
        torch.cat([context.queries[start:end] for start, end in rows]),
        context.cache,
        torch.tensor([0, 7, 27, 28], dtype=torch.int32),
        torch.tensor([end for _, end in rows], dtype=torch.int32),
        context.blocks.repeat(3, 1),
        HEAD_DIM**-0.5,
        None,
    )
    assert torch.equal(together, torch.cat([whole[start:end] for start, end in rows]))
