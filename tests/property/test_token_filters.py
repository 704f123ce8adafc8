"""Thresholds of top-k and top-p against a full sort in float64, ties and crowds included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine_service import token_filters
from engine_service.messages import SamplingParams
from engine_service.token_filters import NUM_CANDIDATES, draw_tokens

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


def thresholds(z_RV: Tensor, params: list[SamplingParams]) -> Tensor:
    found = token_filters._thresholds(z_RV, z_RV.exp(), params)
    return torch.full((len(params),), -math.inf) if found is None else found


def check_row(z_V: Tensor, params: SamplingParams, threshold: float) -> None:
    """The k largest count, then the likeliest of them up to p, whatever equals the last too."""
    k = params.top_k if 0 < params.top_k < VOCAB else VOCAB
    ranked = z_V.double().sort(descending=True).values[:k]
    assert threshold >= ranked[-1] or (k == VOCAB and threshold == -math.inf)
    if params.top_p == 1.0:
        assert threshold == (ranked[-1] if k < VOCAB else -math.inf)
        return
    assert bool((z_V == threshold).any())
    goal, slack = params.top_p * float(ranked.exp().sum()), 2e-5 * float(ranked.exp().sum())
    assert float(ranked[ranked > threshold].exp().sum()) < goal + slack
    assert float(ranked[ranked >= threshold].exp().sum()) >= goal - slack


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_those_of_a_sort_alone_and_in_a_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = [SamplingParams(top_k=k, top_p=p) for k in TOP_KS for p in TOP_PS]
    order = torch.randperm(len(params), generator=generator).tolist()
    params = [params[i] for i in order]
    z_RV = random_z(len(params), generator)
    together = thresholds(z_RV, params)
    uniforms = torch.rand(len(params), generator=generator).tolist()
    drawn = draw_tokens(z_RV, params, uniforms)
    for row, of_row in enumerate(params):
        alone = thresholds(z_RV[row : row + 1], [of_row])
        assert torch.equal(together[row : row + 1], alone), of_row
        check_row(z_RV[row], of_row, float(alone))
        (token,) = draw_tokens(z_RV[row : row + 1], [of_row], [uniforms[row]])
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
    wide = SamplingParams(top_k=VOCAB - 1)
    thresholds(z_RV, [SamplingParams(top_k=40)] * 7 + [wide])
    assert sum(largest) <= 7 * NUM_CANDIDATES
    thresholds(z_RV[:1], [SamplingParams(top_k=VOCAB - 1, top_p=0.9)])
    assert largest[-1] < VOCAB / 4
