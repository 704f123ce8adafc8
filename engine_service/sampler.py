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
for it before their logits are computed (`sampling_batch`), and what becomes of their rows is told
in the engine's words.

A temperature below 1e-5, a top_k of 1 and a min_p of 1 are greedy: the largest logit, the lowest
id among equals. A row pays only for what its request asks for. A row that is not finite, or that
is left without a token, fails alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine_service.errors import InvalidRequest
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.logprobs import NOT_FINITE, logprob_entries
from engine_service.messages import Failure, SamplingParams, TokenLogprobs
from engine_service.request import Request
from engine_service.sampling_batch import sampling_batch
from kernels.sampling_batch import (
    GivenTokens,
    LogprobRows,
    PlannedRows,
    RowStatus,
    RowsUnderWay,
    ToldRows,
)
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


class Sampled(NamedTuple):
    tokens: list[SampledToken]  # by row
    given: Sequence[LogprobRows]  # of the given tokens


@dataclass(frozen=True, slots=True)
class PlannedSampling:
    """One token for each row, to be sampled once there are logits."""

    rows: PlannedRows
    told: ToldRows | None
    params: Sequence[SamplingParams]  # by row
    constrained: Container[int]  # rows with a grammar

    def launch(
        self,
        logits_RV: Tensor,
        on_device: Sequence[Tensor] = (),
        given_logits: Iterable[Tensor] = (),
    ) -> SamplingUnderWay:
        """`logits_RV` is float32 and contiguous, has a row for each request and is overwritten.
        The others are those of `PlannedRows.launch`."""
        return SamplingUnderWay(self, self.rows.launch(logits_RV, on_device, given_logits))


@dataclass(frozen=True, slots=True)
class SamplingUnderWay:
    """Rows that the device may still sample."""

    plan: PlannedSampling
    rows: RowsUnderWay

    def wait(self) -> Sampled:
        sampled, plan = self.rows.wait(), self.plan
        failures = {
            row: _failure(status, plan.params[row], row in plan.constrained)
            for row, status in enumerate(sampled.statuses_R.tolist())
            if status != RowStatus.SAMPLED
        }
        logprobs: dict[int, TokenLogprobs] = {}
        if plan.told is not None and sampled.logprobs is not None:
            entries = logprob_entries(sampled.logprobs, plan.told.num_top_L)
            logprobs = dict(zip(plan.told.rows_L.tolist(), entries, strict=True))
        tokens = [
            SampledToken(token_id, logprobs.get(row), failures.get(row))
            for row, token_id in enumerate(sampled.token_ids_R.tolist())
        ]
        return Sampled(tokens, sampled.given)


def plan_sampling(
    requests: Sequence[Request],
    bitmask: GrammarBitmask | None,
    vocab_size: int,
    ops: SamplingOps,
    given: Sequence[GivenTokens] = (),
) -> PlannedSampling:
    """Of a step in which they sample, and other rows tell of `given`. What they ask for is read
    now; the bitmask's words are read with the arrays of `PlannedSampling.rows`, if not before."""
    batch = sampling_batch(requests, bitmask, vocab_size, ops)
    return PlannedSampling(
        rows=ops.plan(batch, given, len(requests), vocab_size),
        told=batch.told,
        params=[request.sampling for request in requests],
        constrained=frozenset() if bitmask is None else frozenset(bitmask.rows),
    )


def _failure(status: int, params: SamplingParams, has_grammar: bool) -> Failure:
    if status == RowStatus.NOT_FINITE:
        return NOT_FINITE
    if status == RowStatus.OVERFLOWS:
        return _PENALTY_OVERFLOWS
    own_lists = params.allowed_token_ids or params.bad_token_sequences
    return _GRAMMAR_IS_STUCK if has_grammar and not own_lists else _NOTHING_ALLOWED
