"""How far what a kernel gives is from what it has to give, for `bench_gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from engine_service.bench_gpu_items import CheckFailed, Figures

# Of a kernel beside the same inputs in float64: what is left is how it rounds on its way.
BOUNDS: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def within(bound: float, errors: Sequence[float]) -> Figures:
    """Raises CheckFailed unless each error is a number of at most `bound`."""
    for error in errors:
        if not error <= bound:
            raise CheckFailed(f"an error of {error:.3g} where {bound:.3g} is allowed")
    return {"error": max(errors), "bound": bound}


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Of the norm."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def share_that_differs(got: Tensor, want: Tensor) -> float:
    """Of the numbers, by their bits."""
    bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
    return float((got.view(bits) != want.view(bits)).double().mean())


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaNs until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
