"""The sampling ops of every backend, and of every form that this machine runs."""

from __future__ import annotations

import pytest

from kernels.cpu.build import machine_forms
from kernels.cpu.library import FORM_VARIABLE
from kernels.sampling_ops import SamplingOps, cpu_sampling_ops, reference_sampling_ops

CPU_FORMS = ("avx512", "avx2", "portable")
SAMPLING_BACKENDS = ("reference", *CPU_FORMS)


def sampling_ops(backend: str, monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    """Until the end of the test. Skips it where the machine has no such form."""
    if backend == "reference":
        return reference_sampling_ops()
    if backend not in machine_forms():
        pytest.skip(f"this machine does not run {backend}")
    monkeypatch.setenv(FORM_VARIABLE, backend)
    return cpu_sampling_ops()
