"""Every Triton kernel beside the reference in float64, for `bench_gpu`.

An error is that of the norm, ||got - exact|| / ||exact||, and NaN never passes. What a kernel
leaves unwritten is NaN. Where bits are compared, the error is the share of numbers that differ and
none may. On a GPU in the shapes of Llama; in Triton's interpreter, which is slow, in small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine_service.bench_gpu_attention import AttentionStep, Heads, Share
from engine_service.bench_gpu_errors import (
    BOUNDS,
    poisoned,
    relative_error,
    share_that_differs,
    within,
)
from engine_service.bench_gpu_items import Figures, Item
from engine_service.bench_gpu_product_checks import (
    ProductSizes,
    fp8,
    fp8_beside_exact_rows,
    linear,
    linear_bits,
    quantized,
)
from kernels.ops import Ops, triton_ops
from kernels.reference.activation import silu_mul
from kernels.reference.norm import add_rms_norm, rms_norm
from kernels.reference.rotary import rotary_cache_write

_EPS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    dtypes: tuple[torch.dtype, ...]
    heads: tuple[Heads, ...]
    num_tokens: int
    hidden_size: int
    products: ProductSizes
    steps: dict[str, tuple[Share, ...]]  # of attention
    window: int  # tokens
    compares_bits: bool  # numpy, which multiplies in the interpreter, promises nothing of them

    @classmethod
    def of_gpu(cls) -> Sizes:
        return cls(
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            heads=(Heads(32, 8, 64), Heads(32, 8, 128)),
            num_tokens=777,
            hidden_size=4096,
            products=ProductSizes(((6144, 4096), (4096, 14_336), (128_256, 2048)), (1, 17, 512)),
            steps={
                "1 decode": (Share(8000),),
                "32 decodes": tuple(Share(1 + 264 * i) for i in range(32)),
                "256 decodes": tuple(Share(1 + 8 * i) for i in range(256)),
                "a prompt": (Share(2048, 2048),),
                "a late chunk": (Share(8192, 512),),
                "chunks and decodes": (
                    Share(1500, 500),
                    *(Share(1 + 97 * i) for i in range(31)),
                    Share(3017, 17),
                ),
            },
            window=1000,
            compares_bits=True,
        )

    @classmethod
    def of_interpreter(cls) -> Sizes:
        return cls(
            dtypes=(torch.float32, torch.bfloat16),
            heads=(Heads(4, 2, 16),),
            num_tokens=9,
            hidden_size=96,
            products=ProductSizes(((96, 160),), (1, 70)),
            steps={
                "decodes": (Share(1), Share(300), Share(17)),
                "chunks and decodes": (Share(280, 40), Share(33), Share(5, 5)),
            },
            window=20,
            compares_bits=False,
        )


def items(sizes: Sizes, device: torch.device) -> list[Item]:
    checks: list[tuple[str, Callable[[Sizes, torch.dtype, torch.device], Figures]]] = [
        ("rms_norm", _rms_norm),
        ("rms_norm of heads", _rms_norm_of_heads),
        ("add_rms_norm", _add_rms_norm),
        ("silu_mul", _silu_mul),
        ("rotary_cache_write", _rotary_cache_write),
        ("copy_blocks", _copy_blocks),
    ]
    product_checks: list[
        tuple[str, Callable[[ProductSizes, torch.dtype, torch.device], Figures]]
    ] = [
        ("linear", linear),
        ("int8", partial(quantized, "int8")),
        ("int4", partial(quantized, "int4")),
        ("fp8", fp8),
        ("fp8 beside exact rows", fp8_beside_exact_rows),
    ]
    if sizes.compares_bits:
        product_checks.append(("linear, bits of rows", linear_bits))
    named: list[Item] = []
    for dtype in sizes.dtypes:
        named += [
            Item(f"{name}, {_name(dtype)}", partial(check, sizes, dtype, device))
            for name, check in checks
        ]
        named += [
            Item(f"{name}, {_name(dtype)}", partial(check_products, sizes.products, dtype, device))
            for name, check_products in product_checks
        ]
        for heads in sizes.heads:
            for name, shares in sizes.steps.items():
                kind = f"heads of {heads.size}, {_name(dtype)}"
                make = partial(AttentionStep.random, shares, heads, dtype, device)
                named.append(Item(f"attention, {name}, {kind}", partial(_attention, make)))
        if dtype == sizes.dtypes[0]:
            named += _other_attention(sizes, device)
    return named


def _other_attention(sizes: Sizes, device: torch.device) -> list[Item]:
    """In the dtype that is checked first."""
    named: list[Item] = []
    for heads in sizes.heads:
        make_mixed = partial(
            AttentionStep.random, sizes.steps["chunks and decodes"], heads, sizes.dtypes[0], device
        )
        kind = f"heads of {heads.size}"
        named.append(Item(f"attention, window, {kind}", partial(_window, make_mixed, sizes.window)))
        if not sizes.compares_bits:
            continue
        named += [
            Item(f"attention, bits of requests, {kind}", partial(_request_bits, make_mixed)),
            Item(f"attention, filled up, {kind}", partial(_filled_bits, make_mixed)),
            Item(f"attention, bits of decodes, {kind}", partial(_decode_bits, make_mixed)),
        ]
    return named


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- row by row


def _rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    x = torch.randn(sizes.num_tokens, sizes.hidden_size, dtype=dtype, device=device)
    weight = torch.randn(sizes.hidden_size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).rms_norm(x, weight, _EPS)
    error = relative_error(got, rms_norm(x.double(), weight.double(), _EPS))
    return within(BOUNDS[dtype], [error])


def _rms_norm_of_heads(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Which lie in one buffer with others."""
    heads = sizes.heads[-1]
    qkv = _qkv(sizes, heads, dtype, device)
    q, weight = qkv[:, : heads.query], torch.randn(heads.size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).rms_norm(q, weight, _EPS)
    error = relative_error(got, rms_norm(q.double(), weight.double(), _EPS))
    return within(BOUNDS[dtype], [error])


def _add_rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Both what it returns and the residual."""
    shape = (sizes.num_tokens, sizes.hidden_size)
    x, residual = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(sizes.hidden_size, dtype=dtype, device=device)
    exact_residual = residual.double()
    exact = add_rms_norm(x.double(), exact_residual, weight.double(), _EPS)
    with poisoned():
        got = triton_ops(False).add_rms_norm(x, residual, weight, _EPS)
    errors = (relative_error(got, exact), relative_error(residual, exact_residual))
    return within(BOUNDS[dtype], errors)


def _silu_mul(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    x = torch.randn(sizes.num_tokens, 7 * sizes.hidden_size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).silu_mul(x)
    return within(BOUNDS[dtype], [relative_error(got, silu_mul(x.double()))])


def _rotary_cache_write(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Queries, and the whole cache: a token of no slot writes nothing."""
    heads, num_tokens = sizes.heads[-1], sizes.num_tokens
    qkv = _qkv(sizes, heads, dtype, device)
    q, k, v = torch.split(qkv, [heads.query, heads.kv, heads.kv], dim=1)
    angles = torch.rand(2 * num_tokens, heads.size // 2, dtype=torch.float64, device=device) * 6.0
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    positions = torch.randperm(2 * num_tokens, device=device)[:num_tokens]
    num_blocks = -(-2 * num_tokens // 16)
    slots = torch.randperm(num_blocks * 16, device=device)[:num_tokens]
    cache = torch.randn(2, num_blocks, 16, heads.kv, heads.size, dtype=dtype, device=device)
    exact_q, exact_cache = q.double(), cache.double()
    skipped = cache.flatten(1, 2)[:, slots[-1]].double()
    wide = (exact_q, k.double(), v.double(), table.double())
    rotary_cache_write(*wide, positions, slots, exact_cache)
    exact_cache.flatten(1, 2)[:, slots[-1]] = skipped
    slots[-1] = -1
    triton_ops(False).rotary_cache_write(q, k, v, table, positions, slots, cache)
    errors = (relative_error(q, exact_q), relative_error(cache, exact_cache))
    return within(BOUNDS[dtype], errors)


def _copy_blocks(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    heads = sizes.heads[-1]
    cache = torch.randn(2, 2, 8, 16, heads.kv, heads.size, dtype=dtype, device=device)
    want = cache.clone()
    want[:, :, [6, 1]] = want[:, :, [0, 5]]
    sources, destinations = torch.tensor([[0, 5], [6, 1]], device=device)
    triton_ops(False).copy_blocks(cache, sources, destinations)
    return within(0.0, [share_that_differs(cache, want)])


def _qkv(sizes: Sizes, heads: Heads, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (sizes.num_tokens, heads.query + 2 * heads.kv, heads.size)
    return torch.randn(shape, dtype=dtype, device=device)


# ---------------------------------------------------------------- attention

_MakeStep = Callable[[], AttentionStep]


def _ops() -> Ops[Tensor]:
    return triton_ops(batch_invariant=False)


def _attention(make: _MakeStep) -> Figures:
    step = make()
    with poisoned():
        got = step.attend(_ops().paged_attention)
    return within(BOUNDS[step.q_TND.dtype], [relative_error(got, step.exact())])


def _window(make: _MakeStep, window: int) -> Figures:
    return _attention(lambda: replace(make(), window=window))


def _request_bits(make: _MakeStep) -> Figures:
    """Of each request among others, and alone."""
    step, attention = make(), _ops().paged_attention
    together = step.attend(attention)
    counts = [share.num_queries for share in step.shares]
    parts = torch.split(together, counts)
    alone = [step.alone(request).attend(attention) for request in range(len(counts))]
    return within(0.0, [share_that_differs(*pair) for pair in zip(alone, parts, strict=True)])


def _filled_bits(make: _MakeStep) -> Figures:
    """Of a step, and of the same with rows that nobody needs."""
    step, attention = make(), _ops().paged_attention
    with poisoned():
        filled = step.filled(3).attend(attention)
    return within(0.0, [share_that_differs(filled[: len(step.q_TND)], step.attend(attention))])


def _decode_bits(make: _MakeStep) -> Figures:
    """Of a chunk's last token, and of the same token by itself."""
    attention, differing = _ops().paged_attention, []
    step = make()
    for request, share in enumerate(step.shares):
        if share.num_queries > 1:
            chunk = step.alone(request)
            decode = chunk.last_query().attend(attention)
            differing.append(share_that_differs(decode, chunk.attend(attention)[-1:]))
    return within(0.0, differing)
