"""Log probabilities of tokens under the model's own distribution, before any parameter edits it.

For sampled tokens the rows are the step's; for prompt tokens each row of the prompt tells the
logprob of the token after it:

    prompt        t0      t1      t2      t3          logits of t3 are the first output's
    logprob of    t1      t2      t3                  t0 follows nothing and has none

A prompt's logits are never all in memory: they are made and dropped some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine_service.errors import InternalError
from engine_service.logit_tiles import row_tiles
from engine_service.messages import Failure, TokenLogprobs
from engine_service.request import RequestKey
from engine_service.scheduler_output import ScheduledRequest

NOT_FINITE = Failure(InternalError.reason, "The model's output is not a finite number.")
PROMPT_ROWS_AT_ONCE = 64  # of logits; 12 MiB with a vocabulary of 49,152


def gather_logprobs(
    logits_LV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """By row: its token's logprob and rank, and the `num_top` likeliest tokens. Reads only."""
    return [
        entry
        for some in row_tiles(logits_LV, len(token_ids))
        for entry in _gather_tile(logits_LV[some], token_ids[some], num_top[some])
    ]


def _gather_tile(
    logits_LV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    chosen_L1 = torch.tensor(token_ids, device=logits_LV.device).unsqueeze(1)
    chosen_logprobs_L1 = logprobs_LV.gather(1, chosen_L1)
    ranks = ((logprobs_LV > chosen_logprobs_L1).sum(dim=-1) + 1).tolist()
    top = logprobs_LV.topk(min(max(num_top), logits_LV.shape[1]), dim=-1)
    rows = zip(
        chosen_logprobs_L1.squeeze(1).tolist(),
        ranks,
        top.indices.tolist(),
        top.values.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, ids[:count], values[:count])
        for logprob, rank, ids, values, count in rows
    ]


def prompt_logprobs(
    scheduled: Sequence[ScheduledRequest],
    logits_of: Callable[[range], Tensor],
) -> tuple[dict[RequestKey, list[TokenLogprobs]], dict[RequestKey, Failure]]:
    """Of the requests that ask, for this step's share; `logits_of` takes flat rows of the step."""
    told: dict[RequestKey, list[TokenLogprobs]] = {}
    failures: dict[RequestKey, Failure] = {}
    first_row = 0  # of the share
    for share in scheduled:
        request, positions = share.request, share.prompt_logprobs_range
        if positions:
            to_row = first_row - share.num_computed_tokens
            entries: list[TokenLogprobs] = []
            for start in range(positions.start, positions.stop, PROMPT_ROWS_AT_ONCE):
                stop = min(start + PROMPT_ROWS_AT_ONCE, positions.stop)
                logits_LV = logits_of(range(start + to_row, stop + to_row))
                targets = request.prompt_token_ids[start + 1 : stop + 1]
                num_top = [request.num_prompt_logprobs or 0] * len(targets)
                entries += gather_logprobs(logits_LV, targets, num_top)
            if all(math.isfinite(entry.logprob) for entry in entries):
                told[request.key] = entries
            else:
                failures[request.key] = NOT_FINITE
        first_row += share.num_scheduled_tokens
    return told, failures
