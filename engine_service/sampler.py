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
    temperature, top-k, top-p, min-p  thresholds on what is left
    draw                              one uniform a token, inverting the cumulative distribution

The steps are one op, `sample_rows`: what each means is in `kernels.reference.sampling` and
`token_filters`, where a uniform comes from in `random_uniform`. Here a step's requests are gathered
for it (`sampling_batch`), and what becomes of their rows is told in the engine's words.

A temperature below 1e-5, a top_k of 1 and a min_p of 1 are greedy: the largest logit, the lowest
id among equals. A row pays only for what its request asks for. A row that is not finite, or that
is left without a token, fails alone.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine_service.errors import InvalidRequest
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.logprobs import NOT_FINITE, logprob_entries
from engine_service.messages import Failure, SamplingParams, TokenLogprobs
from engine_service.request import Request
from engine_service.sampling_batch import sampling_batch
from kernels.sampling_batch import RowStatus, RowsUnderWay, SamplingBatch
from kernels.sampling_ops import SamplingOps

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


class SampledToken(NamedTuple):
    token_id: int  # meaningless when `failure` is set
    logprobs: TokenLogprobs | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SamplingUnderWay:
    """One token for each row, which the device may still sample."""

    rows: RowsUnderWay
    batch: SamplingBatch
    params: Sequence[SamplingParams]  # by row
    constrained: Container[int]  # rows with a grammar

    def wait(self) -> list[SampledToken]:
        sampled, told = self.rows.wait(), self.batch.told
        failures = {
            row: _failure(status, self.params[row], row in self.constrained)
            for row, status in enumerate(sampled.statuses_R.tolist())
            if status != RowStatus.SAMPLED
        }
        logprobs: dict[int, TokenLogprobs] = {}
        if told is not None and sampled.logprobs is not None:
            entries = logprob_entries(sampled.logprobs, told.num_top_L)
            logprobs = dict(zip(told.rows_L.tolist(), entries, strict=True))
        return [
            SampledToken(token_id, logprobs.get(row), failures.get(row))
            for row, token_id in enumerate(sampled.token_ids_R.tolist())
        ]


def launch_sampling(
    logits_RV: Tensor,
    requests: Sequence[Request],
    bitmask: GrammarBitmask | None,
    ops: SamplingOps,
) -> SamplingUnderWay:
    """`logits_RV` is float32 and contiguous, has a row for each request and is overwritten."""
    batch = sampling_batch(requests, bitmask, logits_RV.shape[1], ops)
    constrained = frozenset() if bitmask is None else frozenset(bitmask.rows)
    params = [request.sampling for request in requests]
    return SamplingUnderWay(ops.launch(logits_RV, batch), batch, params, constrained)


def _failure(status: int, params: SamplingParams, has_grammar: bool) -> Failure:
    if status == RowStatus.NOT_FINITE:
        return NOT_FINITE
    if status == RowStatus.OVERFLOWS:
        return _PENALTY_OVERFLOWS
    own_lists = params.allowed_token_ids or params.bad_token_sequences
    return _GRAMMAR_IS_STUCK if has_grammar and not own_lists else _NOTHING_ALLOWED
