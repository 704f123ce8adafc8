"""What the requests of a step ask of their rows, gathered for the sampling ops."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import SamplingParams
from engine_service.request import Request
from kernels.sampling_batch import (
    Biases,
    Draws,
    Penalties,
    RowTokens,
    SamplingBatch,
    TokenMask,
    ToldRows,
)
from kernels.sampling_ops import SamplingOps

GREEDY_BELOW_TEMPERATURE: Final = 1e-5


def sampling_batch(
    requests: Sequence[Request], bitmask: GrammarBitmask | None, vocab_size: int, ops: SamplingOps
) -> SamplingBatch:
    """Request r is row r. Copies: the requests' own arrays stay free to grow."""
    counted: list[int] = []
    biased: dict[int, array[int]] = {}
    allowed: dict[int, array[int]] = {}
    banned: dict[int, array[int]] = {}
    early_ends: dict[int, array[int]] = {}
    drawn: list[int] = []
    told: list[int] = []
    for row, request in enumerate(requests):
        params, lists = request.sampling, request.token_lists
        if request.token_counts is not None and request.token_counts.token_ids:
            counted.append(row)
        if lists.biased:
            biased[row] = lists.biased
        if lists.allowed:
            allowed[row] = lists.allowed
        if lists.bad_sequences is not None:
            completing = lists.bad_sequences.completing(request.output_token_ids)
            if completing:
                banned[row] = completing
        if lists.early_ends and request.num_expected_outputs < request.stopping.min_tokens:
            early_ends[row] = lists.early_ends
        if not is_greedy(params):
            drawn.append(row)
        if params.num_logprobs is not None:
            told.append(row)
    return SamplingBatch(
        penalties=_penalties(requests, counted) if counted else None,
        biases=_biases(requests, biased) if biased else None,
        allowed=_row_tokens(allowed) if allowed else None,
        banned=_row_tokens(banned) if banned else None,
        mask=None if bitmask is None else TokenMask(np.array(bitmask.rows), bitmask.words_GW),
        early_ends=_row_tokens(early_ends) if early_ends else None,
        draws=_draws(requests, drawn, ops) if drawn else None,
        told=_told(requests, told, vocab_size) if told else None,
    )


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW_TEMPERATURE or params.top_k == 1 or params.min_p >= 1.0


def _row_tokens(token_ids: dict[int, array[int]]) -> RowTokens:
    starts_E1 = np.zeros(len(token_ids) + 1, np.int64)
    np.cumsum([len(ids) for ids in token_ids.values()], out=starts_E1[1:])
    token_ids_P = np.concatenate([np.frombuffer(ids, np.int64) for ids in token_ids.values()])
    return RowTokens(np.array(list(token_ids)), starts_E1, token_ids_P)


def _penalties(requests: Sequence[Request], rows: list[int]) -> Penalties:
    counts = {row: c for row in rows if (c := requests[row].token_counts) is not None}
    params = [requests[row].sampling for row in counts]
    return Penalties(
        tokens=_row_tokens({row: of_row.token_ids for row, of_row in counts.items()}),
        output_counts_P=np.concatenate(
            [np.frombuffer(of_row.output_counts, np.int64) for of_row in counts.values()]
        ),
        repetition_E=np.array([p.repetition_penalty for p in params], np.float32),
        frequency_E=np.array([p.frequency_penalty for p in params]),
        presence_E=np.array([p.presence_penalty for p in params]),
    )


def _biases(requests: Sequence[Request], biased: dict[int, array[int]]) -> Biases:
    biases = [np.frombuffer(requests[row].token_lists.biases, np.float32) for row in biased]
    return Biases(_row_tokens(biased), np.concatenate(biases))


def _draws(requests: Sequence[Request], rows: list[int], ops: SamplingOps) -> Draws:
    drawn = [requests[row] for row in rows]
    params = [request.sampling for request in drawn]
    uniform_D = ops.random_uniforms(
        np.array([p.seed for p in params], np.uint64),
        np.array([request.index for request in drawn]),
        np.array([request.num_expected_outputs for request in drawn]),
    )
    return Draws(
        rows_D=np.array(rows),
        temperature_D=np.array([p.temperature for p in params], np.float64),
        top_k_D=np.array([p.top_k for p in params]),
        top_p_D=np.array([p.top_p for p in params], np.float64),
        min_p_D=np.array([p.min_p for p in params], np.float64),
        uniform_D=uniform_D,
    )


def _told(requests: Sequence[Request], rows: list[int], vocab_size: int) -> ToldRows:
    asked = [requests[row].sampling.num_logprobs or 0 for row in rows]
    return ToldRows(np.array(rows), np.minimum(asked, vocab_size))
