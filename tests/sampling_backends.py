"""The sampling ops of every backend, and of every form that this machine runs."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.build import machine_forms
from kernels.cpu.library import FORM_VARIABLE
from kernels.sampling_batch import Ints, LogprobRows, SampledRows, SamplingBatch
from kernels.sampling_ops import (
    SamplingOps,
    cpu_sampling_ops,
    reference_sampling_ops,
    triton_sampling_ops,
)

CPU_FORMS = ("avx512", "avx2", "portable")
SAMPLING_BACKENDS = (
    "reference",
    *CPU_FORMS,
    pytest.param("triton", marks=pytest.mark.slow),  # most of it is the interpreter's time
)

_MOST_INTERPRETED_ROWS = 200

# Where Triton's kernels run: without a GPU, in its interpreter, which an environment variable
# chooses before anything imports triton.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if TRITON_DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def sampling_ops(backend: str, monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    """On logits of the CPU, until the end of the test. Skips it where the machine has no such
    form."""
    if backend == "reference":
        return reference_sampling_ops()
    if backend == "triton":
        return _from_host(triton_sampling_ops())
    if backend not in machine_forms():
        pytest.skip(f"this machine does not run {backend}")
    monkeypatch.setenv(FORM_VARIABLE, backend)
    return cpu_sampling_ops()


def _from_host(ops: SamplingOps) -> SamplingOps:
    """Takes logits to the device; what the ops make of them there is not seen.

    Skips a test of more rows than the interpreter does in seconds.
    """

    def sample_rows(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
        if TRITON_DEVICE.type == "cpu" and len(logits_RV) > _MOST_INTERPRETED_ROWS:
            pytest.skip("too many rows for Triton's interpreter")
        with np.errstate(all="ignore"):  # the interpreter's numpy would warn of an overflow
            return ops.sample_rows(logits_RV.to(TRITON_DEVICE), batch)

    def token_logprobs(logits_LV: Tensor, token_ids_L: Ints, num_top_L: Ints) -> LogprobRows:
        with np.errstate(all="ignore"):
            return ops.token_logprobs(logits_LV.to(TRITON_DEVICE), token_ids_L, num_top_L)

    return SamplingOps(sample_rows, token_logprobs, ops.random_uniforms)
