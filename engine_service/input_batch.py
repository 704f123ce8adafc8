"""A step's share of every request, flattened into one ragged batch.

    request      |   a (chunk of 3)   | b (1) |   c (chunk of 2)   |
    input_ids    |  a5     a6     a7  |  b9   |   c0       c1      |     [T]
    positions    |   5      6      7  |   9   |    0        1      |     [T]
    query_start_loc  0                 3       4                   6     [R + 1]
    seq_lens         8                 10      2                         [R]

Tokens of one request are neighbours, in order. A request samples when its share reaches its last
known token; `logits_indices` are the flat rows of those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    input_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slot_mapping_T: Tensor  # int64; block * block_size + offset, where the token's KV goes
    query_start_loc_R1: Tensor  # int32; each request's first flat row, then T
    seq_lens_R: Tensor  # int32; tokens of context, this step's included
    block_table_RM: Tensor  # int32; rows are padded with 0
    logits_indices: Tensor  # int64; flat rows that sample
    sampling_requests: list[Request]  # in the order of logits_indices


def build_input_batch(
    scheduled: list[ScheduledRequest], block_size: int, device: torch.device
) -> InputBatch:
    """Needs at least one scheduled request. Copies: the scheduler's lists stay its own."""
    num_scheduled_R = np.array([share.num_scheduled_tokens for share in scheduled])
    num_computed_R = np.array([share.num_computed_tokens for share in scheduled])
    query_start_loc_R1 = np.zeros(len(scheduled) + 1, np.int32)
    num_scheduled_R.cumsum(out=query_start_loc_R1[1:])

    rows_T = np.arange(len(scheduled)).repeat(num_scheduled_R)
    positions_T = np.arange(len(rows_T)) + (num_computed_R - query_start_loc_R1[:-1])[rows_T]
    block_table_RM = _block_table(scheduled)
    block_positions_T, offsets_T = np.divmod(positions_T, block_size)
    slot_mapping_T = offsets_T + block_table_RM[rows_T, block_positions_T] * np.int64(block_size)
    sampling = [row for row, share in enumerate(scheduled) if share.samples]
    input_ids: list[int] = []
    for share in scheduled:
        first = share.num_computed_tokens
        input_ids += share.request.token_ids[first : first + share.num_scheduled_tokens]

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return InputBatch(
        input_ids_T=tensor(np.array(input_ids)),
        positions_T=tensor(positions_T),
        slot_mapping_T=tensor(slot_mapping_T),
        query_start_loc_R1=tensor(query_start_loc_R1),
        seq_lens_R=tensor((num_computed_R + num_scheduled_R).astype(np.int32)),
        block_table_RM=tensor(block_table_RM),
        logits_indices=tensor(query_start_loc_R1[1:][sampling] - np.int64(1)),
        sampling_requests=[scheduled[row].request for row in sampling],
    )


def _block_table(
    scheduled: list[ScheduledRequest],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    longest = max(len(share.block_ids) for share in scheduled)
    block_table_RM = np.zeros((len(scheduled), longest), np.int32)
    for row_M, share in zip(block_table_RM, scheduled, strict=True):
        row_M[: len(share.block_ids)] = share.block_ids
    return block_table_RM
