"""Log probabilities of tokens under the model's own distribution, before any parameter edits it.

For sampled tokens the rows are the step's; for prompt tokens each row of the prompt tells the
logprob of the token after it:

    prompt        t0      t1      t2      t3          logits of t3 are the first output's
    logprob of    t1      t2      t3                  t0 follows nothing and has none

A prompt's logits are never all in memory: they are made and dropped some rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_service.errors import InternalError
from engine_service.messages import Failure, TokenLogprobs
from engine_service.request import RequestKey
from engine_service.scheduler_output import ScheduledRequest
from kernels.sampling_batch import GivenTokens, Ints, LogprobRows

NOT_FINITE = Failure(InternalError.reason, "The model's output is not a finite number.")
PROMPT_ROWS_AT_ONCE = 64  # of logits; 12 MiB with a vocabulary of 49,152


def logprob_entries(rows: LogprobRows, num_top_L: Ints) -> list[TokenLogprobs]:
    told = zip(
        rows.logprobs_L.tolist(),
        rows.ranks_L.tolist(),
        rows.top_token_ids_LN.tolist(),
        rows.top_logprobs_LN.tolist(),
        num_top_L.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, ids[:count], values[:count])
        for logprob, rank, ids, values, count in told
    ]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request's share, not too many for their logits."""

    key: RequestKey
    rows: range  # of the step, flat
    next_tokens: GivenTokens  # of the prompt, by row


def prompt_rows(scheduled: Sequence[ScheduledRequest], vocab_size: int) -> list[PromptRows]:
    """Those of the requests that ask, in this step's share."""
    found: list[PromptRows] = []
    first_row = 0  # of the share
    for share in scheduled:
        request, positions = share.request, share.prompt_logprobs_range
        to_row = first_row - share.num_computed_tokens
        for start in range(positions.start, positions.stop, PROMPT_ROWS_AT_ONCE):
            stop = min(start + PROMPT_ROWS_AT_ONCE, positions.stop)
            targets_L = np.array(request.prompt_token_ids[start + 1 : stop + 1])
            num_top = min(request.num_prompt_logprobs or 0, vocab_size)
            tokens = GivenTokens(targets_L, np.full(len(targets_L), num_top))
            found.append(PromptRows(request.key, range(start + to_row, stop + to_row), tokens))
        first_row += share.num_scheduled_tokens
    return found


def prompt_logprobs(
    prompts: Sequence[PromptRows], told: Sequence[LogprobRows]
) -> tuple[dict[RequestKey, list[TokenLogprobs]], dict[RequestKey, Failure]]:
    """By request, in the order of its prompt; `told` of each. A request fails whose logits are not
    finite."""
    entries: dict[RequestKey, list[TokenLogprobs]] = {}
    failures: dict[RequestKey, Failure] = {}
    for prompt, of_rows in zip(prompts, told, strict=True):
        if np.isfinite(of_rows.logprobs_L).all():
            new_entries = logprob_entries(of_rows, prompt.next_tokens.num_top_L)
            entries.setdefault(prompt.key, []).extend(new_entries)
        else:
            failures[prompt.key] = NOT_FINITE
    return entries, failures
