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

import numpy as np
import torch
from torch import Tensor

from kernels.sampling_batch import Draws

NUM_CANDIDATES = 256  # of the likeliest tokens: most nuclei are narrower
_BINS_PER_NAT = 32
_NUM_BINS = 32 * _BINS_PER_NAT  # what lies lower weighs nothing: e^-32 of the likeliest


def draw_tokens(logits_DV: Tensor, draws: Draws) -> Tensor:
    """Token ids, [D]. Every row has a finite logit, and none that is NaN or +inf."""
    temperature_D1 = torch.from_numpy(draws.temperature_D).to(logits_DV).unsqueeze(1)
    z_DV = (logits_DV - logits_DV.amax(dim=-1, keepdim=True)).div_(temperature_D1)
    weights_DV = z_DV.exp()
    threshold_D = lowest_kept(z_DV, weights_DV, draws)
    if threshold_D is not None:
        weights_DV.masked_fill_(z_DV < threshold_D.unsqueeze(1), 0.0)

    cumulative_DV = weights_DV.cumsum(dim=-1)
    total_D1 = cumulative_DV[:, -1:]
    target_D1 = torch.from_numpy(draws.uniform_D).to(logits_DV).unsqueeze(1) * total_D1
    below_total_D1 = torch.nextafter(total_D1, torch.zeros_like(total_D1))
    target_D1 = torch.minimum(target_D1, below_total_D1)  # rounding must not pass the last token
    token_ids_D = torch.searchsorted(cumulative_DV, target_D1, right=True).squeeze(1)
    return token_ids_D.clamp_(max=logits_DV.shape[1] - 1)  # a total that is no number passes all


def lowest_kept(z_DV: Tensor, weights_DV: Tensor, draws: Draws) -> Tensor | None:
    """Lowest z that stays, [D]; None when no row filters."""
    device, vocab_size = z_DV.device, z_DV.shape[1]
    has_top_k_D = (draws.top_k_D > 0) & (draws.top_k_D < vocab_size)
    is_wide_D = has_top_k_D & (draws.top_k_D > NUM_CANDIDATES)
    is_narrow_D = ~is_wide_D & (has_top_k_D | (draws.top_p_D < 1.0))
    if not (is_wide_D.any() or is_narrow_D.any() or draws.min_p_D.any()):
        return None
    with np.errstate(divide="ignore"):  # a min_p of 0 is at -inf
        threshold_D = torch.from_numpy(np.log(draws.min_p_D)).to(z_DV)
    for is_some_D, find in ((is_narrow_D, _rank_thresholds), (is_wide_D, _wide_top_k_thresholds)):
        if is_some_D.all():
            threshold_D = torch.maximum(threshold_D, find(z_DV, weights_DV, draws))
        elif is_some_D.any():
            rows = torch.from_numpy(is_some_D.nonzero()[0]).to(device)
            found_S = find(z_DV[rows], weights_DV[rows], draws[is_some_D])
            threshold_D[rows] = torch.maximum(threshold_D[rows], found_S)
    return threshold_D


def _rank_thresholds(z_DV: Tensor, weights_DV: Tensor, draws: Draws) -> Tensor:
    """Thresholds of top-k, where it is off or at most NUM_CANDIDATES, and of top-p, [D]."""
    vocab_size = z_DV.shape[1]
    top_k = [k if 0 < k < vocab_size else vocab_size for k in draws.top_k_D.tolist()]
    top_k_D = torch.tensor(top_k, device=z_DV.device)
    top_p_D = torch.from_numpy(draws.top_p_D).to(z_DV)
    total_D = weights_DV.cumsum(dim=-1)[:, -1]

    num_candidates = max(min(k, NUM_CANDIDATES) for k in top_k)
    candidates_DC = z_DV.topk(num_candidates, dim=-1).values
    threshold_D, known_D = _cut(candidates_DC, top_k_D, top_p_D, total_D, vocab_size)
    if not bool(known_D.all()):
        rows = (~known_D).nonzero().squeeze(1)
        goal_D = top_p_D[rows] * total_D[rows]
        threshold_D[rows] = _wide_nucleus(z_DV[rows], weights_DV[rows], goal_D)
    return threshold_D


def _wide_top_k_thresholds(z_DV: Tensor, weights_DV: Tensor, draws: Draws) -> Tensor:
    """Thresholds of a top-k above NUM_CANDIDATES, and of top-p in what that leaves, [D]."""
    vocab_size = z_DV.shape[1]
    ranks = vocab_size - draws.top_k_D + 1
    threshold_D = torch.stack(
        [z_V.kthvalue(rank).values for z_V, rank in zip(z_DV, ranks.tolist(), strict=True)]
    )
    has_nucleus_D = draws.top_p_D < 1.0
    if not has_nucleus_D.any():
        return threshold_D
    nuclei = draws[has_nucleus_D]
    rows = torch.from_numpy(has_nucleus_D.nonzero()[0]).to(z_DV.device)
    top_k_N = torch.from_numpy(nuclei.top_k_D).to(z_DV.device)
    top_p_N = torch.from_numpy(nuclei.top_p_D).to(z_DV)
    kth_N, z_NV = threshold_D[rows], z_DV[rows]
    above_NV = z_NV > kth_N.unsqueeze(1)
    weights_NV = weights_DV[rows]
    total_N = weights_NV.masked_fill(~above_NV, 0.0).cumsum(dim=-1)[:, -1]
    total_N += (top_k_N - above_NV.sum(dim=-1)) * kth_N.exp()  # k of them, whatever equals the last
    weights_NV.masked_fill_(z_NV < kth_N.unsqueeze(1), 0.0)
    of_nucleus_N = _wide_nucleus(z_NV, weights_NV, top_p_N * total_N)
    threshold_D[rows] = torch.maximum(kth_N, of_nucleus_N)
    return threshold_D


def _wide_nucleus(z_DV: Tensor, weights_DV: Tensor, goal_D: Tensor) -> Tensor:
    """The z at which the weights, added from the likeliest down, reach the goal, [D].

    bins     |  0  |  1  | ... |  b  | ...       of z, downwards from 0
    weight   |<- less than goal ->|
                               |<- in order ->|  the goal is reached in here
    """
    bins_DV = (z_DV * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).long()
    weight_DB = torch.zeros(len(z_DV), _NUM_BINS, device=z_DV.device)
    cumulative_DB = weight_DB.scatter_add_(1, bins_DV, weights_DV).cumsum(dim=-1)
    bin_D1 = (cumulative_DB < goal_D.unsqueeze(1)).sum(dim=-1, keepdim=True)
    bin_D1.clamp_(max=_NUM_BINS - 1)  # rounding must not pass the last bin
    before_D1 = torch.where(bin_D1 > 0, cumulative_DB.gather(1, (bin_D1 - 1).clamp(min=0)), 0.0)

    inside_DV = bins_DV == bin_D1
    most = int(inside_DV.sum(dim=-1).max())
    ordered_DC = z_DV.masked_fill(~inside_DV, -math.inf).topk(max(most, 1), dim=-1).values
    reached_DC = before_D1 + ordered_DC.exp().cumsum(dim=-1) >= goal_D.unsqueeze(1)
    # Where rounding leaves the goal out of reach, all of the bin stays.
    last_D = inside_DV.sum(dim=-1) - 1
    cut_D = torch.where(reached_DC.any(dim=-1), reached_DC.int().argmax(dim=-1), last_D)
    return ordered_DC.gather(1, cut_D.clamp_(min=0).unsqueeze(1)).squeeze(1)


def _cut(
    sorted_DC: Tensor, top_k_D: Tensor, top_p_D: Tensor, total_D: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The z of the last token that stays, and whether the C largest sufficed to know it.

    Top-k keeps k of them, C or less, and top-p its share of those. Where top-k is off, top-p takes
    its share of the whole row's weight, `total_D`.
    """
    num_sorted = sorted_DC.shape[1]
    k_is_on_D = top_k_D < vocab_size
    num_looked_at_D = torch.where(k_is_on_D, top_k_D, NUM_CANDIDATES).clamp(max=num_sorted)
    looked_at_DC = torch.arange(num_sorted, device=sorted_DC.device) < num_looked_at_D.unsqueeze(1)
    cumulative_DC = (sorted_DC.exp() * looked_at_DC).cumsum(dim=-1)
    goal_D = top_p_D * torch.where(k_is_on_D, cumulative_DC[:, -1], total_D)
    reached_DC = (cumulative_DC >= goal_D.unsqueeze(1)) & (top_p_D < 1.0).unsqueeze(1)
    reached_D = reached_DC.any(dim=-1)
    cut_D = torch.where(reached_D, reached_DC.int().argmax(dim=-1), num_looked_at_D - 1)
    return sorted_DC.gather(1, cut_D.unsqueeze(1)).squeeze(1), reached_D | k_is_on_D
