"""Drawing a token from what temperature, top-k, top-p and min-p leave of each row.

Every filter is a threshold on the row's logits: top-k's is the k-th largest, top-p's the smallest
of the likeliest tokens that together reach p (of what top-k left), min-p's lies log(min_p) below
the largest. Tokens at or above all three stay, equal logits always together, and the draw
inverts their cumulative distribution in the order of token ids:

    z = (logit - largest) / temperature        weight = exp(z) where z >= threshold, else 0
    token = first id whose cumulative weight exceeds uniform * total

No row is sorted. What top-k or top-p leave lies among the few hundred likeliest tokens, which
`topk` finds, or is wider. A wider top-k's threshold is selected; for a wider nucleus the row's
weights are summed in bins of z, and only the bin in which they reach p is put in order. All sums
run along one row in a fixed order, so that a row's token cannot depend on how many others there
are; and a row costs the same whatever the others ask for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_service.messages import SamplingParams

NUM_CANDIDATES = 256  # of the likeliest tokens: most nuclei are narrower
_BINS_PER_NAT = 32
_NUM_BINS = 32 * _BINS_PER_NAT  # what lies lower weighs nothing: e^-32 of the likeliest


def draw_tokens(
    logits_RV: Tensor, params: Sequence[SamplingParams], uniforms_R: Sequence[float]
) -> Tensor:
    """Token ids, [R]. Every row has a finite logit, temperatures are above zero."""
    device = logits_RV.device
    temperature_R1 = torch.tensor([[p.temperature] for p in params], device=device)
    z_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).div_(temperature_R1)
    weights_RV = z_RV.exp()
    threshold_R = _thresholds(z_RV, weights_RV, params)
    if threshold_R is not None:
        weights_RV.masked_fill_(z_RV < threshold_R.unsqueeze(1), 0.0)

    cumulative_RV = weights_RV.cumsum(dim=-1)
    total_R1 = cumulative_RV[:, -1:]
    target_R1 = torch.tensor(uniforms_R, dtype=torch.float32, device=device).unsqueeze(1) * total_R1
    below_total_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    target_R1 = torch.minimum(target_R1, below_total_R1)  # rounding must not pass the last token
    token_ids_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
    return token_ids_R.clamp_(max=logits_RV.shape[1] - 1)  # a total that is no number passes all


def _thresholds(
    z_RV: Tensor, weights_RV: Tensor, params: Sequence[SamplingParams]
) -> Tensor | None:
    """Lowest z that stays, [R]; None when no row filters."""
    vocab_size = z_RV.shape[1]
    ranked = [row for row, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    wide = [row for row in ranked if NUM_CANDIDATES < params[row].top_k < vocab_size]
    narrow = [row for row in ranked if not NUM_CANDIDATES < params[row].top_k < vocab_size]
    if not ranked and all(p.min_p == 0.0 for p in params):
        return None
    lowest = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    threshold_R = torch.tensor(lowest, device=z_RV.device)
    for some, find in ((narrow, _rank_thresholds), (wide, _wide_top_k_thresholds)):
        if len(some) == len(params):
            threshold_R = torch.maximum(threshold_R, find(z_RV, weights_RV, params))
        elif some:
            rows = torch.tensor(some, device=z_RV.device)
            found_S = find(z_RV[rows], weights_RV[rows], [params[row] for row in some])
            threshold_R[rows] = torch.maximum(threshold_R[rows], found_S)
    return threshold_R


def _rank_thresholds(z_RV: Tensor, weights_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Thresholds of top-k, where it is off or at most NUM_CANDIDATES, and of top-p, [R]."""
    vocab_size = z_RV.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_k_R = torch.tensor(top_k, device=z_RV.device)
    top_p_R = torch.tensor([p.top_p for p in params], device=z_RV.device)
    total_R = weights_RV.cumsum(dim=-1)[:, -1]

    num_candidates = max(min(k, NUM_CANDIDATES) for k in top_k)
    candidates_RC = z_RV.topk(num_candidates, dim=-1).values
    threshold_R, known_R = _cut(candidates_RC, top_k_R, top_p_R, total_R, vocab_size)
    if not bool(known_R.all()):
        rows = (~known_R).nonzero().squeeze(1)
        goal_R = top_p_R[rows] * total_R[rows]
        threshold_R[rows] = _wide_nucleus(z_RV[rows], weights_RV[rows], goal_R)
    return threshold_R


def _wide_top_k_thresholds(
    z_RV: Tensor, weights_RV: Tensor, params: Sequence[SamplingParams]
) -> Tensor:
    """Thresholds of a top-k above NUM_CANDIDATES, and of top-p in what that leaves, [R]."""
    vocab_size = z_RV.shape[1]
    threshold_R = torch.stack(
        [z_V.kthvalue(vocab_size - p.top_k + 1).values for z_V, p in zip(z_RV, params, strict=True)]
    )
    nuclei = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if not nuclei:
        return threshold_R
    rows = torch.tensor(nuclei, device=z_RV.device)
    top_k_N = torch.tensor([params[row].top_k for row in nuclei], device=z_RV.device)
    top_p_N = torch.tensor([params[row].top_p for row in nuclei], device=z_RV.device)
    kth_N, z_NV = threshold_R[rows], z_RV[rows]
    above_NV = z_NV > kth_N.unsqueeze(1)
    weights_NV = weights_RV[rows]
    total_N = weights_NV.masked_fill(~above_NV, 0.0).cumsum(dim=-1)[:, -1]
    total_N += (top_k_N - above_NV.sum(dim=-1)) * kth_N.exp()  # k of them, whatever equals the last
    weights_NV.masked_fill_(z_NV < kth_N.unsqueeze(1), 0.0)
    of_nucleus_N = _wide_nucleus(z_NV, weights_NV, top_p_N * total_N)
    threshold_R[rows] = torch.maximum(kth_N, of_nucleus_N)
    return threshold_R


def _wide_nucleus(z_RV: Tensor, weights_RV: Tensor, goal_R: Tensor) -> Tensor:
    """The z at which the weights, added from the likeliest down, reach the goal, [R].

    bins     |  0  |  1  | ... |  b  | ...       of z, downwards from 0
    weight   |<- less than goal ->|
                               |<- in order ->|  the goal is reached in here
    """
    bins_RV = (z_RV * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).long()
    weight_RB = torch.zeros(len(z_RV), _NUM_BINS, device=z_RV.device)
    cumulative_RB = weight_RB.scatter_add_(1, bins_RV, weights_RV).cumsum(dim=-1)
    bin_R1 = (cumulative_RB < goal_R.unsqueeze(1)).sum(dim=-1, keepdim=True)
    bin_R1.clamp_(max=_NUM_BINS - 1)  # rounding must not pass the last bin
    before_R1 = torch.where(bin_R1 > 0, cumulative_RB.gather(1, (bin_R1 - 1).clamp(min=0)), 0.0)

    inside_RV = bins_RV == bin_R1
    most = int(inside_RV.sum(dim=-1).max())
    ordered_RC = z_RV.masked_fill(~inside_RV, -math.inf).topk(max(most, 1), dim=-1).values
    reached_RC = before_R1 + ordered_RC.exp().cumsum(dim=-1) >= goal_R.unsqueeze(1)
    # Where rounding leaves the goal out of reach, all of the bin stays.
    last_R = inside_RV.sum(dim=-1) - 1
    cut_R = torch.where(reached_RC.any(dim=-1), reached_RC.int().argmax(dim=-1), last_R)
    return ordered_RC.gather(1, cut_R.clamp_(min=0).unsqueeze(1)).squeeze(1)


def _cut(
    sorted_RC: Tensor, top_k_R: Tensor, top_p_R: Tensor, total_R: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The z of the last token that stays, and whether the C largest sufficed to know it.

    Top-k keeps k of them, C or less, and top-p its share of those. Where top-k is off, top-p takes
    its share of the whole row's weight, `total_R`.
    """
    num_sorted = sorted_RC.shape[1]
    k_is_on_R = top_k_R < vocab_size
    num_looked_at_R = torch.where(k_is_on_R, top_k_R, NUM_CANDIDATES).clamp(max=num_sorted)
    looked_at_RC = torch.arange(num_sorted, device=sorted_RC.device) < num_looked_at_R.unsqueeze(1)
    cumulative_RC = (sorted_RC.exp() * looked_at_RC).cumsum(dim=-1)
    goal_R = top_p_R * torch.where(k_is_on_R, cumulative_RC[:, -1], total_R)
    reached_RC = (cumulative_RC >= goal_R.unsqueeze(1)) & (top_p_R < 1.0).unsqueeze(1)
    reached_R = reached_RC.any(dim=-1)
    cut_R = torch.where(reached_R, reached_RC.int().argmax(dim=-1), num_looked_at_R - 1)
    return sorted_RC.gather(1, cut_R.unsqueeze(1)).squeeze(1), reached_R | k_is_on_R
