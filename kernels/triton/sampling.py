"""Sampling on a GPU: a step's rows from their raw logits to one token each, without a wait.

    host      pack the batch   |  ------ goes on: schedules the next step ------ |  wait
    copies          parameters ->                                    -> tokens, statuses, logprobs
    device                     | edit rows | draw rows | tell logprobs |

One copy goes there and one comes back, and nothing between them asks the device for an answer: the
next step's inputs can be taken from `PendingSample.token_ids_R` before the host has seen them.

Each kernel has one program a row, which reads its row a few times and none other: what a row costs
and what becomes of it follows from the row alone, bit by bit (`sampling_rows` says why sums can't
differ). The uniforms of draws come with the batch, made on the host: a number a row is less than
one more kernel would cost, and has the same bits on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.sampling_batch import SampledRows, SamplingBatch
from kernels.triton.logprobs import launch_logprobs
from kernels.triton.sampling_draw import draw_rows
from kernels.triton.sampling_edits import edit_rows
from kernels.triton.sampling_params import DeviceParams, check_logits, upload_params
from kernels.triton.sampling_results import PendingResults, SamplingResults
from kernels.triton.sampling_rows import PROGRAM_OPTIONS, tile_size
from kernels.triton.sampling_threshold import NUM_CANDIDATES


@dataclass(frozen=True, slots=True)
class PendingSample:
    token_ids_R: Tensor  # int64, on the device; 0 for a row that cannot be sampled
    results: PendingResults

    def wait(self) -> SampledRows:
        """Waits for this step's sampling, and for nothing that was launched after it."""
        return self.results.wait()


def sample_rows(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    """As `kernels.reference.sampling.sample_rows`; raises as `launch_sampling`."""
    return launch_sampling(logits_RV, batch).wait()


def launch_sampling(logits_RV: Tensor, batch: SamplingBatch) -> PendingSample:
    """Starts the sampling of `logits_RV` on its device's current stream. Overwrites the logits,
    which must not be written by others until then.

    The batch's arrays are copied before this returns. Raises TypeError for logits that are not
    float32 and contiguous, ValueError for a row or a token that is none of theirs.
    """
    check_logits(logits_RV)
    device, num_rows = logits_RV.device, logits_RV.shape[0]
    told = batch.told
    num_told = 0 if told is None else len(told.rows_L)
    most_top = 0 if told is None else int(told.num_top_L.max(initial=0))
    params = upload_params(batch, logits_RV)
    results = SamplingResults.empty(num_rows, num_told, most_top, device)
    if num_rows > 0:
        with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
            _launch(logits_RV, params, batch.draws is not None, results)
    return PendingSample(results.token_ids_R, results.copy_to_host())


def _launch(
    logits_RV: Tensor, params: DeviceParams, has_draws: bool, results: SamplingResults
) -> None:
    device, (num_rows, vocab_size) = logits_RV.device, logits_RV.shape
    tile = tile_size(vocab_size)
    largest_R = torch.empty(num_rows, device=device)
    smallest_R = torch.empty(num_rows, device=device)
    raw_copies_CV = torch.empty((params.num_raw_copies, vocab_size), device=device)
    edit_rows[(num_rows,)](
        logits_RV,
        raw_copies_CV,
        params.ints_RF,
        params.reals_RF,
        params.token_ids_P,
        params.amounts_P,
        params.words_GW,
        torch.empty(len(params.token_ids_P), device=device),
        largest_R,
        smallest_R,
        results.token_ids_R,
        results.statuses_R,
        vocab_size,
        params.words_GW.shape[1],
        TILE=tile,
        **PROGRAM_OPTIONS,
    )
    if has_draws:
        num_tiles = triton.cdiv(vocab_size, tile)
        draw_rows[(num_rows,)](
            logits_RV,
            params.ints_RF,
            params.reals_RF,
            largest_R,
            smallest_R,
            results.statuses_R,
            results.token_ids_R,
            torch.empty((num_rows, NUM_CANDIDATES.value), device=device),
            torch.empty((num_rows, num_tiles), dtype=torch.int64, device=device),
            vocab_size,
            num_tiles,
            TILE=tile,
            TILES=triton.next_power_of_2(num_tiles),
            **PROGRAM_OPTIONS,
        )
    if len(params.told_LF) > 0:
        launch_logprobs(logits_RV, raw_copies_CV, params.told_LF, results.token_ids_R, results)
