"""Sampling on a GPU: a step's rows from their raw logits to one token each, without a wait.

    host    plan: pack the batch  |  launch  | ---- goes on: schedules the next step ---- |  wait
    copies            parameters ->                            -> tokens, statuses, logprobs
    device                    | ... logits | edit rows | draw rows | tell logprobs |

A plan is made before there are logits, so that its parameters go to the device with whatever else
a step needs there. One copy comes back, and nothing before it asks the device for an answer: the
next step's inputs can be taken from `PendingSample.token_ids_R` before the host has seen them.

Each kernel has one program a row, which reads its row a few times and none other: what a row costs
and what becomes of it follows from the row alone, bit by bit (`sampling_rows` says why sums can't
differ). The uniforms of draws come with the batch, made on the host: a number a row is less than
one more kernel would cost, and has the same bits on every backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.array_places import HostArray, upload
from kernels.sampling_batch import GivenTokens, Ints, LogprobRows, SampledRows, SamplingBatch
from kernels.triton.logprobs import launch_logprobs
from kernels.triton.sampling_draw import draw_rows
from kernels.triton.sampling_edits import edit_rows
from kernels.triton.sampling_params import (
    DeviceParams,
    PackedParams,
    check_logits,
    given_arrays,
    pack_params,
)
from kernels.triton.sampling_results import PendingResults, ResultsBuffer, SamplingResults
from kernels.triton.sampling_rows import PROGRAM_OPTIONS, tile_size
from kernels.triton.sampling_threshold import NUM_CANDIDATES


@dataclass(frozen=True, slots=True)
class PendingSample:
    token_ids_R: Tensor  # int64, on the device; 0 for a row that cannot be sampled
    results: PendingResults

    def wait(self) -> SampledRows:
        """Waits for this step's sampling, and for nothing that was launched after it."""
        return self.results.wait()


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """`arrays` lie on the device, unchanged, while what was launched with them runs."""

    params: PackedParams
    given_arrays: Sequence[HostArray]  # by pairs: token ids and told records
    num_rows: int
    vocab_size: int
    has_draws: bool
    groups: Sequence[tuple[int, int]]  # as ResultsBuffer.empty

    @property
    def arrays(self) -> Sequence[HostArray]:
        return [*self.params.arrays, *self.given_arrays]

    def launch(
        self, logits_RV: Tensor, on_device: Sequence[Tensor], given_logits: Iterable[Tensor] = ()
    ) -> PendingSample:
        """Starts the sampling of `logits_RV` on its device's current stream. Overwrites the logits,
        which must not be written by others until then.

        Raises TypeError for logits that are not float32 and contiguous, ValueError for others than
        those that were planned for.
        """
        check_logits(logits_RV)
        if logits_RV.shape != (self.num_rows, self.vocab_size):
            raise ValueError(
                f"logits of {tuple(logits_RV.shape)} for {self.num_rows} rows of {self.vocab_size}"
            )
        buffer = ResultsBuffer.empty(self.num_rows, self.groups, logits_RV.device)
        results = buffer.results()
        num_params = len(self.params.arrays)
        with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
            if self.num_rows > 0:
                self._launch(logits_RV, DeviceParams(*on_device[:num_params]), results)
            token_ids, told = on_device[num_params::2], on_device[num_params + 1 :: 2]
            given = zip(given_logits, told, token_ids, results.groups[1:], strict=True)
            for logits_LV, told_LF, token_ids_L, group in given:
                check_logits(logits_LV)
                launch_logprobs(logits_LV, logits_LV, told_LF, token_ids_L, group)
        return PendingSample(results.token_ids_R, buffer.copy_to_host())

    def _launch(self, logits_RV: Tensor, params: DeviceParams, results: SamplingResults) -> None:
        device, num_rows, vocab_size = logits_RV.device, self.num_rows, self.vocab_size
        tile = tile_size(vocab_size)
        largest_R = torch.empty(num_rows, device=device)
        smallest_R = torch.empty(num_rows, device=device)
        raw_copies_CV = torch.empty((self.params.num_raw_copies, vocab_size), device=device)
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
        if self.has_draws:
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
            launch_logprobs(
                logits_RV, raw_copies_CV, params.told_LF, results.token_ids_R, results.groups[0]
            )


def plan_sampling(
    batch: SamplingBatch, given: Sequence[GivenTokens], num_rows: int, vocab_size: int
) -> PlannedSample:
    """All of it is read when the plan's arrays are written. Raises ValueError for a row or a token
    that is none of the logits'."""
    num_top = [np.empty(0, np.int64) if batch.told is None else batch.told.num_top_L]
    num_top += [tokens.num_top_L for tokens in given]
    return PlannedSample(
        params=pack_params(batch, num_rows, vocab_size),
        given_arrays=[array for tokens in given for array in given_arrays(tokens, vocab_size)],
        num_rows=num_rows,
        vocab_size=vocab_size,
        has_draws=batch.draws is not None,
        groups=[(len(num_top_L), int(num_top_L.max(initial=0))) for num_top_L in num_top],
    )


def sample_rows(logits_RV: Tensor, batch: SamplingBatch) -> SampledRows:
    """As `kernels.reference.sampling.sample_rows`; raises as `plan_sampling` and
    `PlannedSample.launch`."""
    check_logits(logits_RV)
    planned = plan_sampling(batch, (), *logits_RV.shape)
    return planned.launch(logits_RV, upload(planned.arrays, logits_RV.device)).wait()


def token_logprobs(logits_LV: Tensor, token_ids_L: Ints, num_top_L: Ints) -> LogprobRows:
    """As `kernels.reference.token_logprobs.token_logprobs`; raises as `sample_rows`, and ValueError
    for more than 1,024 likeliest tokens."""
    check_logits(logits_LV)
    planned = plan_sampling(
        SamplingBatch(), [GivenTokens(token_ids_L, num_top_L)], 0, logits_LV.shape[1]
    )
    on_device = upload(planned.arrays, logits_LV.device)
    (told,) = planned.launch(logits_LV[:0], on_device, [logits_LV]).wait().given
    return told
