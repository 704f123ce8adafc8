"""A nucleus wider than the candidates is found without a sort, and is the one that a sort finds."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.token_filters import _wide_nucleus


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_a_wide_nucleus_is_the_one_that_a_sort_finds(scale: float, top_p: float) -> None:
    z = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(8)) * scale
    z -= z.amax(dim=-1, keepdim=True)
    z[3, 100:] = -200.0  # mostly next to nothing
    weights = z.exp()
    goal = top_p * weights.cumsum(dim=-1)[:, -1]
    threshold = _wide_nucleus(z, weights, goal)
    ordered = z.double().sort(dim=-1, descending=True).values
    cumulative = ordered.exp().cumsum(dim=-1)
    expected = (cumulative >= top_p * cumulative[:, -1:]).int().argmax(dim=-1) + 1
    kept = (z >= threshold.unsqueeze(1)).sum(dim=-1)
    assert (kept - expected).abs().max() <= 1 + 1e-4 * float(expected.max())  # rounding
