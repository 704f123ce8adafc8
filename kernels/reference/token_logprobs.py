"""Log probabilities of given tokens and of the likeliest ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.reference.logit_tiles import row_tiles
from kernels.sampling_batch import Ints, LogprobRows


def token_logprobs(logits_LV: Tensor, token_ids_L: Ints, num_top_L: Ints) -> LogprobRows:
    """By row: its token's logprob and rank, and the `num_top` likeliest tokens, 0 to V of them,
    equals in the order of ids.

    Reads only. A row that is not finite has NaN for its token's logprob.
    """
    num_rows, most_top = len(token_ids_L), int(num_top_L.max(initial=0))
    told = LogprobRows(
        logprobs_L=np.empty(num_rows, np.float32),
        ranks_L=np.empty(num_rows, np.int64),
        top_token_ids_LN=np.empty((num_rows, most_top), np.int64),
        top_logprobs_LN=np.empty((num_rows, most_top), np.float32),
    )
    for some in row_tiles(logits_LV, num_rows):
        _tell(logits_LV[some], token_ids_L[some], told, some)
    return told


def _tell(logits_LV: Tensor, token_ids_L: Ints, told: LogprobRows, rows: slice) -> None:
    """One tile."""
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    logprobs_LV[~logits_LV.isfinite().all(dim=-1)] = torch.nan
    chosen_L1 = torch.from_numpy(token_ids_L).to(logits_LV.device).unsqueeze(1)
    chosen_logprobs_L1 = logprobs_LV.gather(1, chosen_L1)
    top_ids_LN = _ranks(logits_LV).topk(told.top_logprobs_LN.shape[1], dim=-1).indices
    told.logprobs_L[rows] = chosen_logprobs_L1.squeeze(1).cpu()
    told.ranks_L[rows] = ((logits_LV > logits_LV.gather(1, chosen_L1)).sum(dim=-1) + 1).cpu()
    told.top_token_ids_LN[rows] = top_ids_LN.cpu()
    told.top_logprobs_LN[rows] = logprobs_LV.gather(1, top_ids_LN).cpu()


def _ranks(logits_LV: Tensor) -> Tensor:
    """Integers in the order of the logits, equals in that of falling ids: no two are the same.

    A float's bits are ordered like the float, but for the direction of negative ones.
    """
    bits_LV = (logits_LV + 0.0).view(torch.int32)  # no -0.0, which would be below 0.0
    ordered_LV = bits_LV ^ ((bits_LV >> 31) & 0x7FFFFFFF)
    return (ordered_LV.long() << 32) - torch.arange(logits_LV.shape[1], device=logits_LV.device)
