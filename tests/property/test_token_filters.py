"""Thresholds of top-k and top-p against a full sort in float64, ties and crowds included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.token_filters import NUM_CANDIDATES, draw_tokens, lowest_kept
from kernels.sampling_batch import Draws

VOCAB = 3000
TOP_KS = (0, 1, 7, NUM_CANDIDATES, NUM_CANDIDATES + 1, 700, VOCAB - 1, VOCAB, 10**9)
TOP_PS = (1.0, 0.999, 0.9, 0.3, 1e-6)


def random_z(rows: int, generator: torch.Generator) -> Tensor:
    """Logits below the largest; every other row in coarse steps, with hundreds of equals."""
    scale_R1 = torch.rand(rows, 1, generator=generator) * 4 + 0.01
    z_RV = torch.randn(rows, VOCAB, generator=generator) * scale_R1
    z_RV[::2] = (z_RV[::2] * 2).round() / 2
    z_RV[::5, 1500:] = -math.inf  # what a grammar or allowed_token_ids takes away
    return z_RV - z_RV.amax(dim=-1, keepdim=True)


def draws(filters: list[tuple[int, float]], uniforms: list[float] | None = None) -> Draws:
    """Of pairs of a top_k and a top_p."""
    ones = np.ones(len(filters))
    return Draws(
        rows_D=np.arange(len(filters)),
        temperature_D=ones,
        top_k_D=np.array([k for k, _ in filters]),
        top_p_D=np.array([p for _, p in filters]),
        min_p_D=0.0 * ones,
        uniform_D=0.5 * ones if uniforms is None else np.array(uniforms),
    )


def thresholds(z_RV: Tensor, filters: list[tuple[int, float]]) -> Tensor:
    found = lowest_kept(z_RV, z_RV.exp(), draws(filters))
    return torch.full((len(filters),), -math.inf) if found is None else found


def check_row(z_V: Tensor, top_k: int, top_p: float, threshold: float) -> None:
    """The k largest count, then the likeliest of them up to p, whatever equals the last too."""
    k = top_k if 0 < top_k < VOCAB else VOCAB
    ranked = z_V.double().sort(descending=True).values[:k]
    assert threshold >= ranked[-1] or (k == VOCAB and threshold == -math.inf)
    if top_p == 1.0:
        assert threshold == (ranked[-1] if k < VOCAB else -math.inf)
        return
    assert bool((z_V == threshold).any())
    goal, slack = top_p * float(ranked.exp().sum()), 2e-5 * float(ranked.exp().sum())
    assert float(ranked[ranked > threshold].exp().sum()) < goal + slack
    assert float(ranked[ranked >= threshold].exp().sum()) >= goal - slack


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_those_of_a_sort_alone_and_in_a_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    filters = [(k, p) for k in TOP_KS for p in TOP_PS]
    order = torch.randperm(len(filters), generator=generator).tolist()
    filters = [filters[i] for i in order]
    z_RV = random_z(len(filters), generator)
    together = thresholds(z_RV, filters)
    uniforms = torch.rand(len(filters), generator=generator).tolist()
    drawn = draw_tokens(z_RV, draws(filters, uniforms))
    for row, (top_k, top_p) in enumerate(filters):
        alone = thresholds(z_RV[row : row + 1], [(top_k, top_p)])
        assert torch.equal(together[row : row + 1], alone), (top_k, top_p)
        check_row(z_RV[row], top_k, top_p, float(alone))
        (token,) = draw_tokens(z_RV[row : row + 1], draws([(top_k, top_p)], [uniforms[row]]))
        assert token == drawn[row]


def test_a_wide_top_k_sorts_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    topk = Tensor.topk

    def recording(self: Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        largest.append(len(self) * k)
        return topk(self, k, dim)

    monkeypatch.setattr(Tensor, "topk", recording)
    generator = torch.Generator().manual_seed(1)
    z_RV = torch.randn(8, VOCAB, generator=generator)
    z_RV -= z_RV.amax(dim=-1, keepdim=True)
    thresholds(z_RV, [(40, 1.0)] * 7 + [(VOCAB - 1, 1.0)])
    assert sum(largest) <= 7 * NUM_CANDIDATES
    thresholds(z_RV[:1], [(VOCAB - 1, 0.9)])
    assert largest[-1] < VOCAB / 4
