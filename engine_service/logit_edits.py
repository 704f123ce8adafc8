"""What a request's parameters do to single logits before a token is drawn.

Each edit is one gather and one scatter for the whole batch, over the (row, token) pairs that it
concerns; a batch without such pairs costs a look at each request. Logits are [R, V], float32 and
contiguous, and are edited in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_service.request import Request

_MINUS_INF = float("-inf")


def _places(logits_RV: Tensor, token_ids: dict[int, array[int]]) -> Tensor:
    """Places in the flat logits of some token ids, by row."""
    vocab_size = logits_RV.shape[1]
    places_P = np.concatenate(
        [np.frombuffer(ids, np.int64) + row * vocab_size for row, ids in token_ids.items()]
    )
    return torch.from_numpy(places_P).to(logits_RV.device)


def apply_penalties(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output."""
    counted = [
        (row, request.sampling, request.token_counts)
        for row, request in enumerate(requests)
        if request.token_counts is not None and request.token_counts.token_ids
    ]
    if not counted:
        return
    # np.concatenate copies: the requests' own arrays stay free to grow.
    ids_P = np.concatenate([np.frombuffer(counts.token_ids, np.int64) for *_, counts in counted])
    counts_P = np.concatenate(
        [np.frombuffer(counts.output_counts, np.int64) for *_, counts in counted]
    )
    lengths = [len(counts.token_ids) for *_, counts in counted]
    places_P = np.repeat([row for row, *_ in counted], lengths) * logits_RV.shape[1] + ids_P
    repetition_P = np.repeat([p.repetition_penalty for _, p, _ in counted], lengths)
    frequency_P = np.repeat([p.frequency_penalty for _, p, _ in counted], lengths)
    presence_P = np.repeat([p.presence_penalty for _, p, _ in counted], lengths)
    loss_P = frequency_P * counts_P + presence_P * (counts_P > 0)

    flat = logits_RV.view(-1)
    places = torch.from_numpy(places_P).to(flat.device)
    penalty = torch.from_numpy(repetition_P).to(flat)
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / penalty, values * penalty)
    flat.index_copy_(0, places, values - torch.from_numpy(loss_P).to(flat))


def apply_logit_bias(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    lists = {row: q.token_lists for row, q in enumerate(requests) if q.token_lists.biased}
    if not lists:
        return
    places = _places(logits_RV, {row: of_row.biased for row, of_row in lists.items()})
    biases_P = np.concatenate([np.frombuffer(i.biases, np.float32) for i in lists.values()])
    flat = logits_RV.view(-1)
    flat.index_add_(0, places, torch.from_numpy(biases_P).to(flat.device))


def keep_allowed_tokens(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    """-inf for what is not in a request's allowed_token_ids."""
    allowed = {
        row: q.token_lists.allowed for row, q in enumerate(requests) if q.token_lists.allowed
    }
    if not allowed:
        return
    flat, places = logits_RV.view(-1), _places(logits_RV, allowed)
    values = flat.index_select(0, places)
    logits_RV.index_fill_(0, torch.tensor(list(allowed), device=flat.device), _MINUS_INF)
    flat.index_copy_(0, places, values)


def ban_bad_sequences(logits_RV: Tensor, requests: Sequence[Request]) -> None:
    """-inf for each token that would complete one of the request's bad sequences."""
    banned: dict[int, array[int]] = {}
    for row, request in enumerate(requests):
        if sequences := request.sampling.bad_token_sequences:
            completing = _completing_tokens(sequences, request.output_token_ids)
            if completing:
                banned[row] = completing
    if banned:
        logits_RV.view(-1).index_fill_(0, _places(logits_RV, banned), _MINUS_INF)


def _completing_tokens(sequences: Sequence[Sequence[int]], output: Sequence[int]) -> array[int]:
    """The last token of every sequence whose other tokens the output ends with."""
    completing = [
        sequence[-1]
        for sequence in sequences
        if len(sequence) == 1
        or (len(sequence) <= len(output) + 1 and _ends_with(output, sequence[:-1]))
    ]
    return array("q", completing)


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    return all(a == b for a, b in zip(reversed(output), reversed(tokens), strict=False))


@dataclass(frozen=True, slots=True)
class MaskedEnds:
    """End tokens that min_tokens took away, and how to give them back."""

    token_ids: dict[int, Tensor]  # by row
    logits: dict[int, Tensor]  # by row, of those tokens

    def restore(self, logits_RV: Tensor, rows: Collection[int]) -> bool:
        """Gives the ends back to those of `rows` that lost any; whether there were such rows."""
        restored = self.token_ids.keys() & rows
        for row in restored:
            logits_RV[row, self.token_ids[row]] = self.logits[row]
        return bool(restored)


def mask_early_ends(logits_RV: Tensor, requests: Sequence[Request]) -> MaskedEnds:
    """-inf for every end token of a request that has not its min_tokens yet."""
    ends = {
        row: q.token_lists.early_ends
        for row, q in enumerate(requests)
        if q.token_lists.early_ends and q.num_output_tokens < q.stopping.min_tokens
    }
    if not ends:
        return MaskedEnds({}, {})
    flat, places = logits_RV.view(-1), _places(logits_RV, ends)
    sizes = [len(of_row) for of_row in ends.values()]
    values = torch.split(flat.index_select(0, places), sizes)
    flat.index_fill_(0, places, _MINUS_INF)
    token_ids = torch.split(places % logits_RV.shape[1], sizes)
    return MaskedEnds(dict(zip(ends, token_ids, strict=True)), dict(zip(ends, values, strict=True)))
