"""What sampling finds, on the device and then on the host: one buffer, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.array_places import ArrayPlaces, PlacedArray
from kernels.sampling_batch import LogprobRows, SampledRows


class ToldResults(NamedTuple):
    """Of one group of rows that tell logprobs."""

    logprobs_L: Tensor  # float32
    ranks_L: Tensor  # int64
    top_token_ids_LN: Tensor  # int64
    top_logprobs_LN: Tensor  # float32

    def rows(self) -> LogprobRows:
        return LogprobRows(*(tensor.numpy() for tensor in self))


@dataclass(frozen=True, slots=True)
class SamplingResults:
    token_ids_R: Tensor  # int64
    statuses_R: Tensor  # int32
    groups: Sequence[ToldResults]  # the sampled rows that tell, then those of each GivenTokens


@dataclass(frozen=True, slots=True)
class ResultsBuffer:
    """Its numbers are undefined until kernels wrote them."""

    places: ArrayPlaces
    on_device: Tensor  # uint8

    @classmethod
    def empty(
        cls, num_rows: int, groups: Sequence[tuple[int, int]], device: torch.device
    ) -> ResultsBuffer:
        """`groups`: how many rows of each tell, and of how many likeliest tokens at most."""
        arrays = [PlacedArray((num_rows,), np.int64), PlacedArray((num_rows,), np.int32)]
        for num_told, most_top in groups:
            arrays += (
                PlacedArray((num_told,), np.float32),
                PlacedArray((num_told,), np.int64),
                PlacedArray((num_told, most_top), np.int64),
                PlacedArray((num_told, most_top), np.float32),
            )
        places = ArrayPlaces.behind(0, arrays)
        buffer = torch.empty(places.num_bytes, dtype=torch.uint8, device=device)
        return cls(places, buffer)

    def results(self) -> SamplingResults:
        return self._results_in(self.on_device)

    def _results_in(self, buffer: Tensor) -> SamplingResults:
        token_ids_R, statuses_R, *told = self.places.views(buffer)
        groups = [ToldResults(*told[first : first + 4]) for first in range(0, len(told), 4)]
        return SamplingResults(token_ids_R, statuses_R, groups)

    def copy_to_host(self) -> PendingResults:
        """Of what the device will have written by then; does not wait for it."""
        device = self.on_device.device
        if device.type != "cuda":
            return PendingResults(self.results(), None)
        host = torch.empty(self.on_device.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(self.on_device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        return PendingResults(self._results_in(host), copied)


@dataclass(frozen=True, slots=True)
class PendingResults:
    """On their way to the host."""

    on_host: SamplingResults  # undefined until `copied`
    copied: torch.cuda.Event | None  # None: from the start

    def wait(self) -> SampledRows:
        if self.copied is not None:
            self.copied.synchronize()
        sampled, *given = (group.rows() for group in self.on_host.groups)
        return SampledRows(
            self.on_host.token_ids_R.numpy(),
            self.on_host.statuses_R.numpy(),
            sampled if len(sampled.ranks_L) > 0 else None,
            given,
        )
