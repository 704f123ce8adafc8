"""Drawing a token from what temperature, top-k, top-p and min-p leave of each row.

Every filter is a threshold on the row's logits: top-k's is the k-th largest, top-p's the smallest
of the likeliest tokens that together reach p (of what top-k left), min-p's lies log(min_p) below
the largest. Tokens at or above all three stay, equal logits always together, and the draw
inverts their cumulative distribution in the order of token ids:

    z = (logit - largest) / temperature        weight = exp(z) where z >= threshold, else 0
    token = first id whose cumulative weight exceeds uniform * total

Nothing is sorted but a few hundred candidates, unless a nucleus is wider than those. All sums run
along one row in a fixed order, so that a row's token cannot depend on how many others there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.messages import SamplingParams

NUM_CANDIDATES = 256  # of the likeliest tokens, looked at before a row is sorted whole


def draw_tokens(
    logits_RV: Tensor, params: Sequence[SamplingParams], uniforms_R: Sequence[float]
) -> Tensor:
    """Token ids, [R]. Every row has a finite logit, temperatures are above zero."""
    device = logits_RV.device
    temperature_R1 = torch.tensor([[p.temperature] for p in params], device=device)
    z_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1
    weights_RV = z_RV.exp()
    threshold_R = _thresholds(z_RV, weights_RV, params)
    if threshold_R is not None:
        weights_RV.masked_fill_(z_RV < threshold_R.unsqueeze(1), 0.0)

    cumulative_RV = weights_RV.cumsum(dim=-1)
    total_R1 = cumulative_RV[:, -1:]
    target_R1 = torch.tensor(uniforms_R, dtype=torch.float32, device=device).unsqueeze(1) * total_R1
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(target_R1, below_total_R1)  # rounding must not pass the last token
    return torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)


def _thresholds(
    z_RV: Tensor, weights_RV: Tensor, params: Sequence[SamplingParams]
) -> Tensor | None:
    """Lowest z that stays, [R]; None when no row filters."""
    vocab_size = z_RV.shape[1]
    ranked = [row for row, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    if not ranked and all(p.min_p == 0.0 for p in params):
        return None
    lowest = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    threshold_R = torch.tensor(lowest, device=z_RV.device)
    if ranked:
        rows = torch.tensor(ranked, device=z_RV.device)
        of_rank = _rank_thresholds(z_RV[rows], weights_RV[rows], [params[row] for row in ranked])
        threshold_R[rows] = torch.maximum(threshold_R[rows], of_rank)
    return threshold_R


def _rank_thresholds(z_RV: Tensor, weights_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Thresholds of top-k and top-p, [R]: from the candidates, or from the whole row sorted."""
    vocab_size = z_RV.shape[1]
    top_k_R = torch.tensor(
        [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=z_RV.device
    )
    top_p_R = torch.tensor([p.top_p for p in params], device=z_RV.device)
    total_R = weights_RV.cumsum(dim=-1)[:, -1]

    candidates_RC = z_RV.topk(min(NUM_CANDIDATES, vocab_size), dim=-1).values
    threshold_R, known_R = _cut(candidates_RC, top_k_R, top_p_R, total_R, vocab_size)
    if not bool(known_R.all()):
        rows = (~known_R).nonzero().squeeze(1)
        sorted_RV = z_RV[rows].sort(dim=-1, descending=True).values
        threshold_R[rows], _ = _cut(
            sorted_RV, top_k_R[rows], top_p_R[rows], total_R[rows], vocab_size
        )
    return threshold_R


def _cut(
    sorted_RC: Tensor, top_k_R: Tensor, top_p_R: Tensor, total_R: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The z of the last token that stays, and whether the C largest sufficed to know it.

    `total_R` is the weight of the whole row, of which top-p takes its share when top-k is off.
    """
    num_sorted = sorted_RC.shape[1]
    within_k_RC = torch.arange(num_sorted, device=sorted_RC.device) < top_k_R.unsqueeze(1)
    cumulative_RC = (sorted_RC.exp() * within_k_RC).cumsum(dim=-1)
    k_is_on_R = top_k_R < vocab_size
    k_fits_R = top_k_R <= num_sorted
    goal_R = top_p_R * torch.where(k_is_on_R, cumulative_RC[:, -1], total_R)
    reached_RC = (cumulative_RC >= goal_R.unsqueeze(1)) & (top_p_R < 1.0).unsqueeze(1)
    reached_R = reached_RC.any(dim=-1)
    last_R = torch.minimum(top_k_R, torch.full_like(top_k_R, num_sorted)) - 1
    cut_R = torch.where(reached_R, reached_RC.int().argmax(dim=-1), last_R)
    known_R = k_fits_R | (reached_R & ~k_is_on_R)
    return sorted_RC.gather(1, cut_R.unsqueeze(1)).squeeze(1), known_R
