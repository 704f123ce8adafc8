"""From logits to one token a row, for all rows of a step that sample.

    raw logits -> logprobs            what the model itself thinks; only for rows that ask
    penalties                         repetition over prompt and output, then frequency and
                                      presence over the output
    logit_bias                        added
    grammar mask                      -inf for what the grammar forbids
    min_tokens                        -inf for every end token until reached; gives way where the
                                      grammar allows nothing but an end
    temperature, top-k, top-p, min-p  `token_filters`
    draw                              one uniform a token, `random_uniform`

A temperature below 1e-5, a top_k of 1 and a min_p of 1 are greedy: the largest logit, the lowest
id among equals. A row pays only for what its request asks for. A row that is not finite, or that
is left without a token, fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_service.errors import InternalError
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import Failure, SamplingParams, TokenLogprobs
from engine_service.random_uniform import uniforms
from engine_service.request import Request
from engine_service.token_filters import draw_tokens
from kernels.ops import Ops

GREEDY_BELOW_TEMPERATURE = 1e-5
_NOT_FINITE = Failure(InternalError.reason, "The model's output is not a finite number.")
_NOTHING_ALLOWED = Failure(InternalError.reason, "The constraints leave no token to choose.")
_MINUS_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int  # meaningless when `failure` is set
    logprobs: TokenLogprobs | None = None
    failure: Failure | None = None


def sample_tokens(
    logits_RV: Tensor, requests: Sequence[Request], bitmask: GrammarBitmask | None, ops: Ops
) -> list[SampledToken]:
    """One token for each row of `logits_RV`, which is float32 and is overwritten."""
    broken = _reset_broken_rows(logits_RV)
    logprob_rows = [r for r, q in enumerate(requests) if q.sampling.num_logprobs is not None]
    raw_logprobs = logits_RV[logprob_rows].log_softmax(dim=-1) if logprob_rows else None

    _apply_penalties(logits_RV, requests)
    _apply_logit_bias(logits_RV, requests)
    if bitmask is not None:
        rows = torch.tensor(bitmask.rows, device=logits_RV.device)
        ops.apply_token_bitmask(logits_RV, rows, bitmask.words_GW.to(logits_RV.device))
    _apply_min_tokens(logits_RV, requests)

    largest_R, greedy_R = logits_RV.max(dim=-1)
    stuck = {row for row, value in enumerate(largest_R.tolist()) if value == _MINUS_INF}
    token_ids = greedy_R.tolist()
    drawn = [
        row
        for row, request in enumerate(requests)
        if not _is_greedy(request.sampling) and row not in broken and row not in stuck
    ]
    if drawn:
        for row, token_id in zip(drawn, _draw(logits_RV, requests, drawn), strict=True):
            token_ids[row] = token_id

    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logprobs is not None:
        logprobs = _gather_logprobs(raw_logprobs, logprob_rows, requests, token_ids)
    failures = dict.fromkeys(stuck, _NOTHING_ALLOWED) | dict.fromkeys(broken, _NOT_FINITE)
    return [
        SampledToken(token_id, logprobs.get(row), failures.get(row))
        for row, token_id in enumerate(token_ids)
    ]


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW_TEMPERATURE or params.top_k == 1 or params.min_p >= 1.0


def _draw(logits_RV: Tensor, requests: Sequence[Request], rows: list[int]) -> list[int]:
    drawing = [requests[row] for row in rows]
    params = [request.sampling for request in drawing]
    uniforms_R = uniforms(
        seeds=[p.seed for p in params],
        sample_indices=[request.index for request in drawing],
        positions=[len(request.output_token_ids) for request in drawing],
    )
    chosen = logits_RV if len(rows) == len(requests) else logits_RV[rows]
    token_ids: list[int] = draw_tokens(chosen, params, uniforms_R.tolist()).tolist()
    return token_ids


def _reset_broken_rows(logits_RV: Tensor) -> set[int]:
    """Rows with a NaN or an infinity, set to 0 so that nothing downstream trips over them."""
    # A sum is finite only if its terms are; one that overflows is looked at again.
    suspects = (~logits_RV.sum(dim=-1).isfinite()).nonzero().squeeze(1)
    if len(suspects) == 0:
        return set()
    broken = suspects[~logits_RV[suspects].isfinite().all(dim=-1)]
    logits_RV[broken] = 0.0
    return set(broken.tolist())


# ---------------------------------------------------------------- edits of single logits


def _apply_penalties(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        params = request.sampling
        logits_V = logits_RV[row]
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(request.token_ids)).to(logits_V.device)
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and request.output_token_ids:
            ids, counts = np.unique(request.output_token_ids, return_counts=True)
            loss = params.frequency_penalty * counts + params.presence_penalty
            where = torch.from_numpy(ids).to(logits_V.device)
            logits_V[where] -= torch.from_numpy(loss).to(logits_V)


def _apply_logit_bias(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    biases: list[float] = []
    for row, request in enumerate(requests):
        bias = request.sampling.logit_bias
        rows.extend([row] * len(bias))
        ids.extend(bias.keys())
        biases.extend(bias.values())
    if rows:
        device = logits_RV.device
        where = (torch.tensor(rows, device=device), torch.tensor(ids, device=device))
        logits_RV[where] += torch.tensor(biases, device=device)


def _apply_min_tokens(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        stopping = request.stopping
        if len(request.output_token_ids) >= stopping.min_tokens:
            continue
        end_ids = list({*stopping.eos_token_ids, *stopping.stop_token_ids})
        if not end_ids:
            continue
        masked_V = logits_RV[row].clone()
        masked_V[end_ids] = _MINUS_INF
        if masked_V.max().item() != _MINUS_INF:
            logits_RV[row] = masked_V


# ---------------------------------------------------------------- logprobs


def _gather_logprobs(
    logprobs_LV: Tensor, rows: list[int], requests: Sequence[Request], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """By row: the chosen token's logprob and rank, and as many of the likeliest as asked for."""
    counts = [requests[row].sampling.num_logprobs or 0 for row in rows]
    chosen_L1 = torch.tensor([[token_ids[row]] for row in rows], device=logprobs_LV.device)
    chosen_logprob_L1 = logprobs_LV.gather(1, chosen_L1)
    ranks = ((logprobs_LV > chosen_logprob_L1).sum(dim=-1) + 1).tolist()
    top = logprobs_LV.topk(min(max(counts), logprobs_LV.shape[1]), dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return {
        row: TokenLogprobs(
            logprob=chosen_logprob_L1[i].item(),
            rank=ranks[i],
            top_token_ids=top_ids[i][: counts[i]],
            top_logprobs=top_values[i][: counts[i]],
        )
        for i, row in enumerate(rows)
    }
