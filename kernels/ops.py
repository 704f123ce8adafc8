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

from torch import Tensor

from kernels.reference.activation import silu_mul
from kernels.reference.attention import paged_attention
from kernels.reference.batch_invariant import BatchInvariantOps
from kernels.reference.bitmask import apply_token_bitmask
from kernels.reference.block_copy import copy_blocks
from kernels.reference.linear import linear, logits_head
from kernels.reference.norm import add_rms_norm, rms_norm
from kernels.reference.rotary import rotary_cache_write


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every op; `kernels.reference` documents the arguments."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary_cache_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    logits_head: Callable[[Tensor, Tensor], Tensor]
    apply_token_bitmask: Callable[[Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]


def reference_ops() -> Ops:
    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_cache_write=rotary_cache_write,
        paged_attention=paged_attention,
        silu_mul=silu_mul,
        linear=linear,
        logits_head=logits_head,
        apply_token_bitmask=apply_token_bitmask,
        copy_blocks=copy_blocks,
    )


def batch_invariant_ops(matrices_OI: Sequence[Tensor], num_kv_heads: int, head_dim: int) -> Ops:
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


def op_backends(ops: Ops) -> dict[str, str]:
    """Which backend computes each op, by the op's name."""
    functions = {field.name: getattr(ops, field.name) for field in fields(ops)}
    return {name: function.__module__.split(".")[1] for name, function in functions.items()}
