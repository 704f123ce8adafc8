"""Every op against the plainest dense mathematics, on sizes that fit nothing evenly."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.ops import Ops, batch_invariant_ops, op_backends, reference_ops
from kernels.reference.bitmask import apply_token_bitmask


def _batch_invariant_ops() -> Ops[Tensor]:
    return batch_invariant_ops([torch.ones(8, 24)], num_kv_heads=2, head_dim=24)


@pytest.fixture(params=[reference_ops, _batch_invariant_ops])
def ops(request: pytest.FixtureRequest) -> Ops[Tensor]:
    ops: Ops[Tensor] = request.param()
    return ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def test_every_op_names_its_backend() -> None:
    assert op_backends(reference_ops()) == {
        field.name: "reference" for field in dataclasses.fields(Ops)
    }


@pytest.mark.parametrize("shape", [(1, 3), (5, 64), (7, 3, 24)])
def test_rms_norm(ops: Ops[Tensor], shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    got = ops.rms_norm(x, weight, 1e-5)
    for index in np.ndindex(shape[:-1]):
        row = [float(value) for value in x[index]]
        scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + 1e-5)
        want = [v * scale * float(w) for v, w in zip(row, weight, strict=True)]
        torch.testing.assert_close(got[index], torch.tensor(want))


def test_rms_norm_of_half_precision_is_computed_in_float32(ops: Ops[Tensor]) -> None:
    x = torch.full((2, 8), 300.0, dtype=torch.float16)  # its square overflows float16
    got = ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.ones_like(got))


def test_add_rms_norm_keeps_the_sum(ops: Ops[Tensor]) -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    total = x + residual
    got = ops.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(got, ops.rms_norm(total, weight, 1e-6))


def test_rotary_rotates_pairs_and_writes_slots(ops: Ops[Tensor]) -> None:
    heads, kv_heads, dim, block_size = 3, 2, 6, 4
    positions, slots = torch.tensor([4, 0, 9]), torch.tensor([7, 2, 12])
    angles = torch.rand(10, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(3, heads + 2 * kv_heads, dim)  # views of one buffer, as the decoder has them
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    q_before, k_before = q.clone(), k.clone()
    cache = torch.full((2, 5, block_size, kv_heads, dim), 99.0)
    ops.rotary_cache_write(q, k, v, table, positions, slots, cache)

    def rotated(x: Tensor, position: int) -> Tensor:
        pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        turned = pairs * torch.polar(torch.ones(dim // 2), angles[position])
        return torch.cat((turned.real, turned.imag), dim=-1)

    for row, (position, slot) in enumerate(zip([4, 0, 9], [7, 2, 12], strict=True)):
        torch.testing.assert_close(q[row], rotated(q_before[row], position))
        where = (slot // block_size, slot % block_size)
        torch.testing.assert_close(cache[0][where], rotated(k_before[row], position))
        torch.testing.assert_close(cache[1][where], v[row])
    untouched = [s for s in range(20) if s not in (7, 2, 12)]
    assert (cache.flatten(1, 2)[:, untouched] == 99.0).all()


@dataclasses.dataclass(frozen=True)
class Attention:
    """A batch over a pool whose blocks are handed out in a random order."""

    q_TND: Tensor
    cache_2BSKD: Tensor
    keys: list[Tensor]  # per request [L, K, D]
    values: list[Tensor]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


def attention_batch(
    shares: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int
) -> Attention:
    """`shares` are (context, queries) per request, the queries being the last of the context."""
    num_blocks = [-(-context // block_size) for context, _ in shares]
    order = torch.randperm(sum(num_blocks) + 3).tolist()
    cache = torch.full((2, len(order), block_size, kv_heads, dim), float("nan"))
    table = torch.zeros(len(shares), max(num_blocks) + 2, dtype=torch.int32)
    keys, values = [], []
    for row, (context, _) in enumerate(shares):
        blocks = [order.pop() for _ in range(num_blocks[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(torch.randn(context, kv_heads, dim))
        values.append(torch.randn(context, kv_heads, dim))
        for position in range(context):
            where = (blocks[position // block_size], position % block_size)
            cache[0][where], cache[1][where] = keys[row][position], values[row][position]
    counts = torch.tensor([0, *(queries for _, queries in shares)])
    return Attention(
        q_TND=torch.randn(int(counts.sum()), heads, dim),
        cache_2BSKD=cache,
        keys=keys,
        values=values,
        query_start_loc=counts.cumsum(0).int(),
        seq_lens=torch.tensor([context for context, _ in shares], dtype=torch.int32),
        block_table=table,
    )


def dense_attention(batch: Attention, scale: float, window: int | None) -> Tensor:
    rows = []
    starts = batch.query_start_loc.tolist()
    for r, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        queries = batch.q_TND[starts[r] : starts[r + 1]]
        first = len(keys) - len(queries)
        group = queries.shape[1] // keys.shape[1]
        for i, query in enumerate(queries):
            lowest = 0 if window is None else max(0, first + i - window + 1)
            seen = slice(lowest, first + i + 1)
            heads = []
            for head, vector in enumerate(query):
                scores = (keys[seen, head // group].double() @ vector.double()) * scale
                heads.append(scores.softmax(0) @ values[seen, head // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows).float()


SHARES = [
    [(1, 1)],
    [(17, 1), (1, 1), (48, 1), (5, 1)],  # decodes
    [(23, 23)],  # a cold prompt
    [(37, 5), (16, 1), (9, 9), (64, 16), (33, 1)],  # chunks and decodes
]


@pytest.mark.parametrize("window", [None, 1, 6, 21, 1000])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 8), (9, 3, 20), (4, 1, 16)])
def test_paged_attention(
    ops: Ops[Tensor],
    shares: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    batch = attention_batch(shares, heads, kv_heads, dim, block_size=7)
    got = ops.paged_attention(
        batch.q_TND,
        batch.cache_2BSKD,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        0.3,
        window,
    )
    torch.testing.assert_close(got, dense_attention(batch, 0.3, window), rtol=1e-4, atol=1e-5)


def test_paged_attention_reads_a_narrower_cache(ops: Ops[Tensor]) -> None:
    batch = attention_batch([(37, 5), (16, 1)], 4, 2, 16, block_size=16)
    got = ops.paged_attention(
        batch.q_TND,
        batch.cache_2BSKD.half(),
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        0.25,
        None,
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, dense_attention(batch, 0.25, None), rtol=0.01, atol=0.005)


def test_a_long_context_is_not_materialised_as_scores() -> None:
    """A 256-token chunk at the end of 8,192: its scores alone would be 9 * 256 * 8192 floats."""
    heads, kv_heads, dim, context, chunk = 9, 3, 64, 8192, 256
    cache = torch.randn(2, context // 16, 16, kv_heads, dim)
    arguments = (
        torch.randn(chunk, heads, dim),
        cache,
        torch.tensor([0, chunk], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        torch.arange(context // 16, dtype=torch.int32).unsqueeze(0),
        0.125,
        None,
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        reference_ops().paged_attention(*arguments)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert largest < heads * chunk * context * 4 / 2


def test_silu_mul(ops: Ops[Tensor]) -> None:
    gate, up = torch.randn(5, 9), torch.randn(5, 9)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(ops.silu_mul(torch.cat((gate, up), dim=-1)), want)


def test_linear_and_logits_head(ops: Ops[Tensor]) -> None:
    x, weight, bias = torch.randn(5, 9), torch.randn(7, 9), torch.randn(7)
    torch.testing.assert_close(ops.linear(x, weight, None), x @ weight.T)
    torch.testing.assert_close(ops.linear(x, weight, bias), x @ weight.T + bias)
    logits = ops.logits_head(x.bfloat16(), weight.bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x @ weight.T, rtol=0.05, atol=0.1)


def test_copy_blocks(ops: Ops[Tensor]) -> None:
    cache = torch.randn(3, 2, 7, 4, 2, 6)
    before = cache.clone()
    ops.copy_blocks(cache, torch.tensor([5, 1, 5]), torch.tensor([0, 4, 6]))
    for block, source in enumerate([5, 1, 2, 3, 1, 5, 5]):
        assert cache[:, :, block].equal(before[:, :, source])


def test_copy_blocks_of_a_half_cache_with_garbage_in_it(ops: Ops[Tensor]) -> None:
    cache = torch.full((1, 2, 3, 4, 1, 2), torch.nan, dtype=torch.bfloat16)
    cache[:, :, 2, :3] = 7.0
    ops.copy_blocks(cache, torch.tensor([2]), torch.tensor([0]))
    assert (cache[:, :, 0, :3] == 7.0).all()
    assert cache[:, :, 0, 3].isnan().all()
    assert cache[:, :, 1].isnan().all()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_apply_token_bitmask(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size)
    before = logits.clone()
    allowed = torch.rand(2, vocab_size) < 0.5
    words = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    as_int32 = (words - ((words >> 31) << 32)).to(torch.int32)  # the top bit is the sign
    apply_token_bitmask(logits, torch.tensor([2, 0]), as_int32)
    assert logits[1].equal(before[1])
    assert logits[3].equal(before[3])
    for mask_row, row in enumerate((2, 0)):
        want = before[row].masked_fill(~allowed[mask_row], float("-inf"))
        assert logits[row].equal(want)
