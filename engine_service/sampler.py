"""From logits to one token a row, for all rows of a step that sample.

    raw logits -> logprobs            what the model itself thinks; only for rows that ask
    penalties                         repetition over prompt and output, then frequency and
                                      presence over the output
    logit_bias                        added
    allowed_token_ids                 -inf for all others
    bad_token_sequences               -inf for what would complete one
    grammar mask                      -inf for what the grammar forbids
    min_tokens                        -inf for every end token until reached; gives way where
                                      nothing but an end is left
    temperature, top-k, top-p, min-p  `token_filters`
    draw                              one uniform a token, `random_uniform`

A temperature below 1e-5, a top_k of 1 and a min_p of 1 are greedy: the largest logit, the lowest
id among equals. A row pays only for what its request asks for. A row that is not finite, or that
is left without a token, fails alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_service.errors import InvalidRequest
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.logit_edits import (
    apply_logit_bias,
    apply_penalties,
    ban_bad_sequences,
    keep_allowed_tokens,
    mask_early_ends,
)
from engine_service.logit_tiles import row_tiles
from engine_service.logprobs import NOT_FINITE, gather_logprobs
from engine_service.messages import Failure, SamplingParams, TokenLogprobs
from engine_service.random_uniform import uniforms
from engine_service.request import Request
from engine_service.token_filters import draw_tokens
from kernels.ops import Ops

GREEDY_BELOW_TEMPERATURE = 1e-5
_NOTHING_ALLOWED = Failure(InvalidRequest.reason, "The constraints leave no token to choose.")
_GRAMMAR_IS_STUCK = Failure(
    InvalidRequest.reason, "No token goes on within this grammar.", "structured_output"
)
# A bias or another penalty moves a logit by so much, a division by any factor.
_PENALTY_OVERFLOWS = Failure(
    InvalidRequest.reason,
    "makes a logit that is not a finite number",
    "sampling.repetition_penalty",
)
_MINUS_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int  # meaningless when `failure` is set
    logprobs: TokenLogprobs | None = None
    failure: Failure | None = None


def sample_tokens(
    logits_RV: Tensor, requests: Sequence[Request], bitmask: GrammarBitmask | None, ops: Ops
) -> list[SampledToken]:
    """One token for each row of `logits_RV`, which is float32, contiguous and is overwritten."""
    broken = _reset_broken_rows(logits_RV)
    logprob_rows = [r for r, q in enumerate(requests) if q.sampling.num_logprobs is not None]
    raw_logits_LV = logits_RV[logprob_rows] if logprob_rows else None  # a copy

    apply_penalties(logits_RV, requests)
    apply_logit_bias(logits_RV, requests)
    keep_allowed_tokens(logits_RV, requests)
    ban_bad_sequences(logits_RV, requests)
    if bitmask is not None:
        rows = torch.tensor(bitmask.rows, device=logits_RV.device)
        ops.apply_token_bitmask(logits_RV, rows, bitmask.words_GW.to(logits_RV.device))
    masked_ends = mask_early_ends(logits_RV, requests)

    token_ids, failures = _largest(logits_RV)
    if failures and masked_ends.restore(logits_RV, failures):
        token_ids, failures = _largest(logits_RV)
    if bitmask is not None:
        for row in failures.keys() & bitmask.rows:
            if failures[row] is _NOTHING_ALLOWED and not _has_constraints(requests[row].sampling):
                failures[row] = _GRAMMAR_IS_STUCK
    failures |= dict.fromkeys(broken, NOT_FINITE)
    drawn = [
        row
        for row, request in enumerate(requests)
        if not _is_greedy(request.sampling) and row not in failures
    ]
    if drawn:
        for row, token_id in zip(drawn, _draw(logits_RV, requests, drawn), strict=True):
            token_ids[row] = token_id

    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits_LV is not None:
        chosen = [token_ids[row] for row in logprob_rows]
        num_top = [requests[row].sampling.num_logprobs or 0 for row in logprob_rows]
        entries = gather_logprobs(raw_logits_LV, chosen, num_top)
        logprobs = dict(zip(logprob_rows, entries, strict=True))
    return [
        SampledToken(token_id, logprobs.get(row), failures.get(row))
        for row, token_id in enumerate(token_ids)
    ]


def _largest(logits_RV: Tensor) -> tuple[list[int], dict[int, Failure]]:
    """The token of each row's largest logit, and what is wrong with rows that have none to draw.

    A NaN is larger than all, so that no row with one, or with an infinity, is drawn from.
    """
    largest_R, token_ids_R = logits_RV.max(dim=-1)
    failures = {
        row: _NOTHING_ALLOWED if value == _MINUS_INF else _PENALTY_OVERFLOWS
        for row, value in enumerate(largest_R.tolist())
        if not math.isfinite(value)
    }
    return token_ids_R.tolist(), failures


def _has_constraints(params: SamplingParams) -> bool:
    """Whether the caller's own lists took tokens away beside the grammar."""
    return bool(params.allowed_token_ids or params.bad_token_sequences)


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
    token_ids: list[int] = []
    for some in row_tiles(logits_RV, len(rows)):
        drawn = draw_tokens(logits_RV[rows[some]], params[some], uniforms_R[some].tolist())
        token_ids += drawn.tolist()
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
