"""From the raw logits of a step's rows to one token each: the meaning of `SamplingBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.reference.bitmask import apply_token_bitmask
from kernels.reference.logit_edits import (
    MaskedEnds,
    add_biases,
    apply_penalties,
    ban_tokens,
    keep_tokens,
    mask_ends,
)
from kernels.reference.logit_tiles import row_tiles
from kernels.reference.token_filters import draw_tokens
from kernels.reference.token_logprobs import token_logprobs
from kernels.sampling_batch import Draws, Ints, RowStatus, SampledRows, SamplingBatch


def sample_rows(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    """One token for each row of `logits_RV`, which is float32, contiguous and is overwritten.

    Every row is edited in the order of the batch's fields. A drawn row takes what `draw_tokens`
    says, any other its largest logit, the lowest id among equals. Logprobs are those of the raw
    logits. What becomes of a row follows from it alone; one that cannot be sampled says why by
    its status.
    """
    broken_R = _reset_broken_rows(logits_RV)
    told = batch.told
    raw_logits_LV = None if told is None else logits_RV[_tensor(told.rows_L, logits_RV)]  # a copy
    ends = _edit(logits_RV, batch)
    token_ids_R, statuses_R = _largest(logits_RV)
    if ends is not None and statuses_R.any():
        ends.restore(logits_RV, statuses_R != RowStatus.SAMPLED)
        token_ids_R, statuses_R = _largest(logits_RV)
    statuses_R[broken_R] = RowStatus.NOT_FINITE
    if batch.draws is not None:
        draws = batch.draws[statuses_R[batch.draws.rows_D] == RowStatus.SAMPLED]
        token_ids_R[draws.rows_D] = _draw(logits_RV, draws)
    logprobs = None
    if told is not None and raw_logits_LV is not None:
        logprobs = token_logprobs(raw_logits_LV, token_ids_R[told.rows_L], told.num_top_L)
    return SampledRows(token_ids_R, statuses_R, logprobs)


def _edit(logits_RV: Tensor, batch: SamplingBatch) -> MaskedEnds | None:
    if batch.penalties is not None:
        apply_penalties(logits_RV, batch.penalties)
    if batch.biases is not None:
        add_biases(logits_RV, batch.biases)
    if batch.allowed is not None:
        keep_tokens(logits_RV, batch.allowed)
    if batch.banned is not None:
        ban_tokens(logits_RV, batch.banned)
    if batch.mask is not None:
        rows_G = _tensor(batch.mask.rows_G, logits_RV)
        apply_token_bitmask(logits_RV, rows_G, batch.mask.words_GW.to(logits_RV.device))
    return None if batch.early_ends is None else mask_ends(logits_RV, batch.early_ends)


def _largest(logits_RV: Tensor) -> tuple[Ints, NDArray[np.int32]]:
    """The token of each row's largest logit, and whether the row can be sampled.

    A NaN is larger than all, so that no row with one, or with an infinity, is drawn from.
    """
    largest_R, token_ids_R = logits_RV.max(dim=-1)
    values_R = largest_R.cpu().numpy()
    statuses_R = np.full(len(values_R), RowStatus.SAMPLED, np.int32)
    statuses_R[~np.isfinite(values_R)] = RowStatus.OVERFLOWS
    statuses_R[np.isneginf(values_R)] = RowStatus.NOTHING_ALLOWED
    return token_ids_R.cpu().numpy(), statuses_R


def _draw(logits_RV: Tensor, draws: Draws) -> Sequence[int]:
    token_ids: list[int] = []
    for some in row_tiles(logits_RV, len(draws.rows_D)):
        tile = draws[some]
        token_ids += draw_tokens(logits_RV[_tensor(tile.rows_D, logits_RV)], tile).tolist()
    return token_ids


def _reset_broken_rows(logits_RV: Tensor) -> Ints:
    """Rows with a NaN or an infinity, set to 0 so that nothing downstream trips over them."""
    # A sum is finite only if its terms are; one that overflows is looked at again.
    suspects = (~logits_RV.sum(dim=-1).isfinite()).nonzero().squeeze(1)
    if len(suspects) == 0:
        return np.empty(0, np.int64)
    broken = suspects[~logits_RV[suspects].isfinite().all(dim=-1)]
    logits_RV[broken] = 0.0
    return np.asarray(broken.cpu())


def _tensor(places: Ints, logits_RV: Tensor) -> Tensor:
    return torch.from_numpy(places).to(logits_RV.device)
