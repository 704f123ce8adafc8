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

import numpy as np
from torch import Tensor

from engine_service.errors import InternalError
from engine_service.messages import Failure, TokenLogprobs
from engine_service.request import RequestKey
from engine_service.scheduler_output import ScheduledRequest
from kernels.sampling_batch import Ints, LogprobRows
from kernels.sampling_ops import SamplingOps

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


def prompt_logprobs(
    scheduled: Sequence[ScheduledRequest],
    logits_of: Callable[[range], Tensor],
    ops: SamplingOps,
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
                targets_L = np.array(request.prompt_token_ids[start + 1 : stop + 1])
                num_top = min(request.num_prompt_logprobs or 0, logits_LV.shape[1])
                num_top_L = np.full(len(targets_L), num_top)
                told_of = ops.token_logprobs(logits_LV, targets_L, num_top_L)
                entries += logprob_entries(told_of, num_top_L)
            if all(math.isfinite(entry.logprob) for entry in entries):
                told[request.key] = entries
            else:
                failures[request.key] = NOT_FINITE
        first_row += share.num_scheduled_tokens
    return told, failures
