"""The ops of sampling, each behind one signature whatever computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.library import library
from kernels.cpu.sampling import random_uniforms as cpu_random_uniforms
from kernels.cpu.sampling import sample_rows as cpu_sample_rows
from kernels.cpu.sampling import token_logprobs as cpu_token_logprobs
from kernels.reference.random_uniform import random_uniforms
from kernels.reference.sampling import sample_rows
from kernels.reference.token_logprobs import token_logprobs
from kernels.sampling_batch import (
    Floats,
    Ints,
    LogprobRows,
    RowsDone,
    RowsUnderWay,
    SampledRows,
    SamplingBatch,
)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation of every op; `kernels.reference` documents the arguments."""

    sample_rows: Callable[[Tensor, SamplingBatch], SampledRows]
    token_logprobs: Callable[[Tensor, Ints, Ints], LogprobRows]
    random_uniforms: Callable[[NDArray[np.uint64], Ints, Ints], Floats]
    launch_sampling: Callable[[Tensor, SamplingBatch], RowsUnderWay] | None = None

    def launch(self, logits_RV: Tensor, batch: SamplingBatch) -> RowsUnderWay:
        """`sample_rows` without the wait, where there is one."""
        if self.launch_sampling is not None:
            return self.launch_sampling(logits_RV, batch)
        rows = self.sample_rows(logits_RV, batch)
        token_ids_R = torch.from_numpy(rows.token_ids_R).to(logits_RV.device)
        return RowsDone(rows, token_ids_R)


def reference_sampling_ops() -> SamplingOps:
    return SamplingOps(sample_rows, token_logprobs, random_uniforms)


def cpu_sampling_ops() -> SamplingOps:
    """On float32 logits of a CPU. Raises KernelBuildError where the kernels can't be compiled."""
    library()
    return SamplingOps(cpu_sample_rows, cpu_token_logprobs, cpu_random_uniforms)


def triton_sampling_ops() -> SamplingOps:
    """On float32 logits of a GPU. Raises ImportError where there is no triton."""
    from kernels.triton.logprobs import token_logprobs as triton_token_logprobs
    from kernels.triton.sampling import launch_sampling as triton_launch_sampling
    from kernels.triton.sampling import sample_rows as triton_sample_rows

    # Few numbers, which the host puts into the batch: it makes them where they are needed.
    return SamplingOps(
        triton_sample_rows, triton_token_logprobs, random_uniforms, triton_launch_sampling
    )
