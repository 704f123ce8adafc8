"""The ops of sampling, each behind one signature whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.array_places import HostArray
from kernels.cpu.library import library
from kernels.cpu.sampling import random_uniforms as cpu_random_uniforms
from kernels.cpu.sampling import sample_rows as cpu_sample_rows
from kernels.cpu.sampling import token_logprobs as cpu_token_logprobs
from kernels.reference.random_uniform import random_uniforms
from kernels.reference.sampling import sample_rows
from kernels.reference.token_logprobs import token_logprobs
from kernels.sampling_batch import (
    Floats,
    GivenTokens,
    Ints,
    LogprobRows,
    PlannedRows,
    RowsDone,
    SampledRows,
    SamplingBatch,
)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation of every op; `kernels.reference` documents the arguments."""

    sample_rows: Callable[[Tensor, SamplingBatch], SampledRows]
    token_logprobs: Callable[[Tensor, Ints, Ints], LogprobRows]
    random_uniforms: Callable[[NDArray[np.uint64], Ints, Ints], Floats]
    plan_sampling: (
        Callable[[SamplingBatch, Sequence[GivenTokens], int, int], PlannedRows] | None
    ) = None

    def plan(
        self, batch: SamplingBatch, given: Sequence[GivenTokens], num_rows: int, vocab_size: int
    ) -> PlannedRows:
        """`sample_rows` and the `token_logprobs` of some given tokens, before there are logits; and
        without a wait where there is none."""
        if self.plan_sampling is not None:
            return self.plan_sampling(batch, given, num_rows, vocab_size)
        return _SampledWhenLaunched(self, batch, given)


@dataclass(frozen=True, slots=True)
class _SampledWhenLaunched:
    """PlannedRows of ops that read on the host what they are asked."""

    ops: SamplingOps
    batch: SamplingBatch
    given: Sequence[GivenTokens]
    arrays: Sequence[HostArray] = ()

    def launch(
        self, logits_RV: Tensor, on_device: Sequence[Tensor], given_logits: Iterable[Tensor] = ()
    ) -> RowsDone:
        rows = self.ops.sample_rows(logits_RV, self.batch)
        told = [
            self.ops.token_logprobs(logits_LV, tokens.token_ids_L, tokens.num_top_L)
            for tokens, logits_LV in zip(self.given, given_logits, strict=True)
        ]
        return RowsDone(replace(rows, given=told) if told else rows, logits_RV.device)


def reference_sampling_ops() -> SamplingOps:
    return SamplingOps(sample_rows, token_logprobs, random_uniforms)


def cpu_sampling_ops() -> SamplingOps:
    """On float32 logits of a CPU. Raises KernelBuildError where the kernels can't be compiled."""
    library()
    return SamplingOps(cpu_sample_rows, cpu_token_logprobs, cpu_random_uniforms)


def triton_sampling_ops() -> SamplingOps:
    """On float32 logits of a GPU. Raises ImportError where there is no triton."""
    from kernels.triton.sampling import plan_sampling as triton_plan_sampling
    from kernels.triton.sampling import sample_rows as triton_sample_rows
    from kernels.triton.sampling import token_logprobs as triton_token_logprobs

    # Few numbers, which the host puts into the batch: it makes them where they are needed.
    return SamplingOps(
        triton_sample_rows, triton_token_logprobs, random_uniforms, triton_plan_sampling
    )
