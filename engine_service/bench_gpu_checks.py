"""Every Triton kernel beside the reference in float64, for `bench_gpu`.

An error is that of the norm, ||got - exact|| / ||exact||, and NaN never passes. What a kernel
leaves unwritten is NaN. Where bits are compared, the error is the share of numbers that differ and
none may. On a GPU in the shapes of Llama; in Triton's interpreter, which is slow, in small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine_service.bench_gpu_attention import AttentionStep, Heads, Share
from engine_service.bench_gpu_items import Figures, Item, within
from kernels.ops import Ops, fp8_triton_ops, quantized_triton_ops, triton_ops
from kernels.reference.activation import silu_mul
from kernels.reference.norm import add_rms_norm, rms_norm
from kernels.reference.quantized import Quantization, dequantize, quantize_matrix
from kernels.reference.rotary import rotary_cache_write

# Inputs are the same numbers in float64: what is left is how a kernel rounds on its way.
_BOUNDS: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_FP8_ROWS_BOUND: Final = 0.05  # of rows with 3 bits of fraction beside themselves
_EPS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    dtypes: tuple[torch.dtype, ...]
    heads: tuple[Heads, ...]
    num_tokens: int
    hidden_size: int
    matrices: tuple[tuple[int, int], ...]  # outputs, inputs
    num_rows: tuple[int, ...]  # of products
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
            matrices=((6144, 4096), (4096, 14_336), (128_256, 2048)),
            num_rows=(1, 17, 512),
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
            matrices=((96, 160),),
            num_rows=(1, 70),
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
        ("linear", _linear),
        ("int8", partial(_quantized, "int8")),
        ("int4", partial(_quantized, "int4")),
        ("fp8", _fp8),
        ("fp8 beside exact rows", _fp8_beside_exact_rows),
    ]
    if sizes.compares_bits:
        checks.append(("linear, bits of rows", _linear_bits))
    named = [
        Item(f"{name}, {_name(dtype)}", partial(check, sizes, dtype, device))
        for dtype in sizes.dtypes
        for name, check in checks
    ]
    for heads in sizes.heads:
        for dtype in sizes.dtypes:
            for name, shares in sizes.steps.items():
                kind = f"heads of {heads.size}, {_name(dtype)}"
                make = partial(AttentionStep.random, shares, heads, dtype, device)
                named.append(Item(f"attention, {name}, {kind}", partial(_attention, make)))
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


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaNs until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def share_that_differs(got: Tensor, want: Tensor) -> float:
    """Of the numbers, by their bits."""
    bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
    return float((got.view(bits) != want.view(bits)).double().mean())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- row by row


def _rms_norm(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    x = torch.randn(sizes.num_tokens, sizes.hidden_size, dtype=dtype, device=device)
    weight = torch.randn(sizes.hidden_size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).rms_norm(x, weight, _EPS)
    return within(relative_error(got, rms_norm(x.double(), weight.double(), _EPS)), _BOUNDS[dtype])


def _rms_norm_of_heads(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Which lie in one buffer with others."""
    heads = sizes.heads[-1]
    qkv = _qkv(sizes, heads, dtype, device)
    q, weight = qkv[:, : heads.query], torch.randn(heads.size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).rms_norm(q, weight, _EPS)
    return within(relative_error(got, rms_norm(q.double(), weight.double(), _EPS)), _BOUNDS[dtype])


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
    return within(max(errors), _BOUNDS[dtype])


def _silu_mul(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    x = torch.randn(sizes.num_tokens, 7 * sizes.hidden_size, dtype=dtype, device=device)
    with poisoned():
        got = triton_ops(False).silu_mul(x)
    return within(relative_error(got, silu_mul(x.double())), _BOUNDS[dtype])


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
    return within(max(errors), _BOUNDS[dtype])


def _copy_blocks(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    heads = sizes.heads[-1]
    cache = torch.randn(2, 2, 8, 16, heads.kv, heads.size, dtype=dtype, device=device)
    want = cache.clone()
    want[:, :, [6, 1]] = want[:, :, [0, 5]]
    sources, destinations = torch.tensor([[0, 5], [6, 1]], device=device)
    triton_ops(False).copy_blocks(cache, sources, destinations)
    return within(share_that_differs(cache, want), 0.0)


def _qkv(sizes: Sizes, heads: Heads, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (sizes.num_tokens, heads.query + 2 * heads.kv, heads.size)
    return torch.randn(shape, dtype=dtype, device=device)


# ---------------------------------------------------------------- matrix products


def _matrices(
    sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """[O, I], and some rows [T, I] for it."""
    for num_outputs, num_inputs in sizes.matrices:
        weight = torch.randn(num_outputs, num_inputs, dtype=dtype, device=device)
        yield (
            weight,
            [torch.randn(rows, num_inputs, dtype=dtype, device=device) for rows in sizes.num_rows],
        )


def _worst(errors: Sequence[float], bound: float) -> Figures:
    return within(max(errors, key=lambda error: float("inf") if error != error else error), bound)


def _linear(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """With a bias, and as the head."""
    ops, errors = triton_ops(batch_invariant=True), []
    for weight, inputs in _matrices(sizes, dtype, device):
        bias = torch.randn(len(weight), dtype=dtype, device=device)
        for x in inputs:
            exact = x.double() @ weight.double().T
            with poisoned():
                errors.append(relative_error(ops.linear(x, weight, bias), exact + bias.double()))
                errors.append(relative_error(ops.logits_head(x, weight), exact))
    return _worst(errors, _BOUNDS[dtype])


def _linear_bits(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Of rows among many, and of the same ones alone."""
    ops, differing = triton_ops(batch_invariant=True), []
    for weight, inputs in _matrices(sizes, dtype, device):
        x = inputs[-1]
        together = ops.linear(x, weight, None)
        for row in (0, len(x) // 2, len(x) - 1):
            alone = ops.linear(x[row : row + 1].clone(), weight, None)
            differing.append(share_that_differs(alone, together[row : row + 1]))
    return _worst(differing, 0.0)


def _quantized(
    quantization: Quantization, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Figures:
    """Beside what the matrix stands for; below and above the rows that go to the library."""
    errors = []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_matrix(weight, quantization)
        wide = dequantize(matrix).double()
        for x in inputs:
            exact = x.double() @ wide.T
            for batch_invariant in (False, True):
                ops = quantized_triton_ops(batch_invariant)
                with poisoned():
                    errors.append(relative_error(ops.linear(x, matrix, None), exact))
                    errors.append(relative_error(ops.logits_head(x, matrix), exact))
    return _worst(errors, _BOUNDS[dtype])


def _fp8(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    """Beside the rows and the matrix as they are in float8."""
    from kernels.triton.fp8 import quantize_fp8, quantize_rows

    ops, errors = fp8_triton_ops(), []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_fp8(weight)
        wide = matrix.values_OI.double() * matrix.scales_O.double()[:, None]
        for x in inputs:
            with poisoned():
                values, scales = quantize_rows(x)
                got = ops.linear(x, matrix, None)
            exact = (values.double() * scales.double()[:, None]) @ wide.T
            errors.append(relative_error(got, exact))
    # What the matrix units add up in float8 has fewer bits than float32.
    return _worst(errors, max(_BOUNDS[dtype], 1e-3))


def _fp8_beside_exact_rows(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Figures:
    from kernels.triton.fp8 import quantize_fp8

    ops, errors = fp8_triton_ops(), []
    for weight, inputs in _matrices(sizes, dtype, device):
        matrix = quantize_fp8(weight)
        wide = matrix.values_OI.double() * matrix.scales_O.double()[:, None]
        errors += [relative_error(ops.logits_head(x, matrix), x.double() @ wide.T) for x in inputs]
    return _worst(errors, _FP8_ROWS_BOUND)


# ---------------------------------------------------------------- attention

_MakeStep = Callable[[], AttentionStep]


def _ops() -> Ops[Tensor]:
    return triton_ops(batch_invariant=False)


def _attention(make: _MakeStep) -> Figures:
    step = make()
    with poisoned():
        got = step.attend(_ops().paged_attention)
    return within(relative_error(got, step.exact()), _BOUNDS[step.q_TND.dtype])


def _window(make: _MakeStep, window: int) -> Figures:
    return _attention(lambda: replace(make(), window=window))


def _request_bits(make: _MakeStep) -> Figures:
    """Of each request among others, and alone."""
    step, attention = make(), _ops().paged_attention
    together = step.attend(attention)
    counts = [share.num_queries for share in step.shares]
    parts = torch.split(together, counts)
    alone = [step.alone(request).attend(attention) for request in range(len(counts))]
    return _worst([share_that_differs(*pair) for pair in zip(alone, parts, strict=True)], 0.0)


def _filled_bits(make: _MakeStep) -> Figures:
    """Of a step, and of the same with rows that nobody needs."""
    step, attention = make(), _ops().paged_attention
    with poisoned():
        filled = step.filled(3).attend(attention)
    return within(share_that_differs(filled[: len(step.q_TND)], step.attend(attention)), 0.0)


def _decode_bits(make: _MakeStep) -> Figures:
    """Of a chunk's last token, and of the same token by itself."""
    attention, differing = _ops().paged_attention, []
    step = make()
    for request, share in enumerate(step.shares):
        if share.num_queries > 1:
            chunk = step.alone(request)
            decode = chunk.last_query().attend(attention)
            differing.append(share_that_differs(decode, chunk.attend(attention)[-1:]))
    return _worst(differing, 0.0)
