"""The ops of a decoder step, each behind one signature whatever computes it.

The backend of an op is the sub-package its function lives in (`kernels.reference`, ...), so what
`op_backends` reports cannot differ from what runs.

Letters after an underscore are a tensor's dimensions:

    T  tokens of the step          R  requests of the step (R1: R + 1)
    H  hidden size                 I, O  inputs and outputs of a projection
    N  query heads                 K  KV heads              D  head size (E: D / 2)
    F  MLP size (G: 2F)            V  vocabulary            W  words of a bitmask row
    B  blocks of the pool          S  slots of a block      M  blocks of the longest request
    Q  one request's queries       L  one request's keys    P  positions
    X  any dimensions before the last, C
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from kernels.cpu.activation import silu_mul as cpu_silu_mul
from kernels.cpu.attention import paged_attention as cpu_paged_attention
from kernels.cpu.block_copy import copy_blocks as cpu_copy_blocks
from kernels.cpu.embedding import embed as cpu_embed
from kernels.cpu.library import library
from kernels.cpu.linear import PackedMatrix
from kernels.cpu.linear import linear as cpu_linear
from kernels.cpu.linear import logits_head as cpu_logits_head
from kernels.cpu.norm import add_rms_norm as cpu_add_rms_norm
from kernels.cpu.norm import rms_norm as cpu_rms_norm
from kernels.cpu.rotary import rotary_cache_write as cpu_rotary_cache_write
from kernels.reference.activation import silu_mul
from kernels.reference.attention import paged_attention
from kernels.reference.batch_invariant import BatchInvariantOps
from kernels.reference.block_copy import copy_blocks
from kernels.reference.embedding import embed
from kernels.reference.linear import linear, logits_head
from kernels.reference.norm import add_rms_norm, rms_norm
from kernels.reference.quantized import (
    QuantizedMatrix,
    quantized_embed,
    quantized_linear,
    quantized_logits_head,
)
from kernels.reference.rotary import rotary_cache_write
from kernels.sampling_ops import SamplingOps

if TYPE_CHECKING:  # triton is asked for by those who have it
    from kernels.triton.fp8 import Fp8Matrix
    from kernels.triton.quantized import IntMatrix

M = TypeVar("M")  # what a backend's products take for a matrix: a tensor, or a packed form


@dataclass(frozen=True, slots=True)
class Ops(Generic[M]):
    """One implementation of every op; `kernels.reference` documents the arguments."""

    embed: Callable[[Tensor, M | Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary_cache_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, M, Tensor | None], Tensor]
    logits_head: Callable[[Tensor, M], Tensor]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]


def reference_ops() -> Ops[Tensor]:
    return Ops(
        embed=embed,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_cache_write=rotary_cache_write,
        paged_attention=paged_attention,
        silu_mul=silu_mul,
        linear=linear,
        logits_head=logits_head,
        copy_blocks=copy_blocks,
    )


def quantized_reference_ops() -> Ops[QuantizedMatrix]:
    """Rows are quantized as the matrices are; for where no faster form runs."""
    plain = reference_ops()
    return Ops(
        embed=quantized_embed,
        rms_norm=plain.rms_norm,
        add_rms_norm=plain.add_rms_norm,
        rotary_cache_write=plain.rotary_cache_write,
        paged_attention=plain.paged_attention,
        silu_mul=plain.silu_mul,
        linear=quantized_linear,
        logits_head=quantized_logits_head,
        copy_blocks=plain.copy_blocks,
    )


def cpu_ops() -> Ops[PackedMatrix]:
    """On float32 tensors of a CPU. The KV cache is in a layout of its own (float32, float16).

    Raises KernelBuildError where the kernels can't be compiled.
    """
    library()
    return Ops(
        embed=cpu_embed,
        rms_norm=cpu_rms_norm,
        add_rms_norm=cpu_add_rms_norm,
        rotary_cache_write=cpu_rotary_cache_write,
        paged_attention=cpu_paged_attention,
        silu_mul=cpu_silu_mul,
        linear=cpu_linear,
        logits_head=cpu_logits_head,
        copy_blocks=cpu_copy_blocks,
    )


def batch_invariant_ops(
    matrices_OI: Sequence[Tensor], num_kv_heads: int, head_dim: int
) -> Ops[Tensor]:
    """Ops that give a token the same bits whatever else the step computes.

    `matrices_OI`: one of every shape that `linear` and `logits_head` will get; what holds of them
    on this machine is found out here. Raises NotBatchInvariant where it cannot be had.
    """
    invariant = BatchInvariantOps(matrices_OI, num_kv_heads, head_dim)
    return replace(
        reference_ops(),
        paged_attention=invariant.paged_attention,
        silu_mul=invariant.silu_mul,
        linear=invariant.linear,
        logits_head=invariant.logits_head,
    )


def triton_ops(batch_invariant: bool) -> Ops[Tensor]:
    """On a GPU, the current device, in bfloat16, float16 or float32; may be captured in a graph.

    `batch_invariant`: a token gets the same bits whatever else the step computes. Otherwise only
    matrix products, which are the library's then, may depend on that. Raises ImportError where
    there is no triton.
    """
    from kernels.triton.activation import silu_mul as triton_silu_mul
    from kernels.triton.attention import paged_attention as triton_paged_attention
    from kernels.triton.block_copy import copy_blocks as triton_copy_blocks
    from kernels.triton.linear import linear as triton_linear
    from kernels.triton.linear import logits_head as triton_logits_head
    from kernels.triton.norm import add_rms_norm as triton_add_rms_norm
    from kernels.triton.norm import rms_norm as triton_rms_norm
    from kernels.triton.rotary import rotary_cache_write as triton_rotary_cache_write

    return Ops(
        embed=embed,
        rms_norm=triton_rms_norm,
        add_rms_norm=triton_add_rms_norm,
        rotary_cache_write=triton_rotary_cache_write,
        paged_attention=triton_paged_attention,
        silu_mul=triton_silu_mul,
        linear=triton_linear if batch_invariant else linear,
        logits_head=triton_logits_head if batch_invariant else logits_head,
        copy_blocks=triton_copy_blocks,
    )


def quantized_triton_ops(batch_invariant: bool) -> Ops[IntMatrix]:
    """Likewise, with int8 or int4 matrices; rows are as they are."""
    from kernels.triton.quantized import QuantizedProducts, int_embed

    plain = triton_ops(batch_invariant)
    products = QuantizedProducts(batch_invariant)
    return Ops(
        embed=int_embed,
        rms_norm=plain.rms_norm,
        add_rms_norm=plain.add_rms_norm,
        rotary_cache_write=plain.rotary_cache_write,
        paged_attention=plain.paged_attention,
        silu_mul=plain.silu_mul,
        linear=products.linear,
        logits_head=products.logits_head,
        copy_blocks=plain.copy_blocks,
    )


def fp8_triton_ops() -> Ops[Fp8Matrix]:
    """Likewise, with float8 matrices, and rows in float8 beside them; always batch-invariant."""
    from kernels.triton.fp8 import fp8_embed, fp8_linear, fp8_logits_head

    plain = triton_ops(batch_invariant=True)
    return Ops(
        embed=fp8_embed,
        rms_norm=plain.rms_norm,
        add_rms_norm=plain.add_rms_norm,
        rotary_cache_write=plain.rotary_cache_write,
        paged_attention=plain.paged_attention,
        silu_mul=plain.silu_mul,
        linear=fp8_linear,
        logits_head=fp8_logits_head,
        copy_blocks=plain.copy_blocks,
    )


def op_backends(ops: Ops[M] | SamplingOps) -> dict[str, str]:
    """Which backend computes each op, by the op's name."""
    functions = {field.name: getattr(ops, field.name) for field in fields(ops)}
    return {
        name: function.__module__.split(".")[1]
        for name, function in functions.items()
        if function is not None
    }
