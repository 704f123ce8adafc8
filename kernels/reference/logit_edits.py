"""What requests do to single logits before a token is drawn.

Each edit is one gather and one scatter for the whole batch, over the (row, token) pairs that it
concerns. Logits are [R, V], float32 and contiguous, and are edited in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling_batch import Biases, Penalties, RowTokens

_MINUS_INF = float("-inf")


def _places(logits_RV: Tensor, tokens: RowTokens) -> Tensor:
    """Places of the pairs in the flat logits."""
    places_P = tokens.rows_P * logits_RV.shape[1] + tokens.token_ids_P
    return torch.from_numpy(places_P).to(logits_RV.device)


def apply_penalties(logits_RV: Tensor, penalties: Penalties) -> None:
    """Repetition of what was said, then frequency and presence of what was generated."""
    tokens, counts_P = penalties.tokens, penalties.output_counts_P
    lengths = np.diff(tokens.starts_E1)
    frequency_P = np.repeat(penalties.frequency_E, lengths)
    presence_P = np.repeat(penalties.presence_E, lengths)
    loss_P = frequency_P * counts_P + presence_P * (counts_P > 0)

    flat, places = logits_RV.view(-1), _places(logits_RV, tokens)
    penalty = torch.from_numpy(np.repeat(penalties.repetition_E, lengths)).to(flat)
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / penalty, values * penalty)
    flat.index_copy_(0, places, values - torch.from_numpy(loss_P).to(flat))


def add_biases(logits_RV: Tensor, biases: Biases) -> None:
    flat = logits_RV.view(-1)
    biases_P = torch.from_numpy(biases.biases_P).to(flat.device)
    flat.index_add_(0, _places(logits_RV, biases.tokens), biases_P)


def keep_tokens(logits_RV: Tensor, allowed: RowTokens) -> None:
    """-inf for all other tokens of those rows."""
    flat, places = logits_RV.view(-1), _places(logits_RV, allowed)
    values = flat.index_select(0, places)
    logits_RV.index_fill_(0, torch.from_numpy(allowed.rows_E).to(flat.device), _MINUS_INF)
    flat.index_copy_(0, places, values)


def ban_tokens(logits_RV: Tensor, banned: RowTokens) -> None:
    """-inf for these."""
    logits_RV.view(-1).index_fill_(0, _places(logits_RV, banned), _MINUS_INF)


@dataclass(frozen=True, slots=True)
class MaskedEnds:
    """End tokens that were taken away, and how to give them back."""

    rows_P: Tensor
    places_P: Tensor
    values_P: Tensor

    def restore(self, logits_RV: Tensor, rows_R: NDArray[np.bool_]) -> None:
        """Gives those of some rows back."""
        restored_P = torch.from_numpy(rows_R).to(logits_RV.device)[self.rows_P]
        logits_RV.view(-1).index_copy_(0, self.places_P[restored_P], self.values_P[restored_P])


def mask_ends(logits_RV: Tensor, ends: RowTokens) -> MaskedEnds:
    """-inf for these."""
    flat, places = logits_RV.view(-1), _places(logits_RV, ends)
    values = flat.index_select(0, places)
    flat.index_fill_(0, places, _MINUS_INF)
    return MaskedEnds(torch.from_numpy(ends.rows_P).to(flat.device), places, values)
