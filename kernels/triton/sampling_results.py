"""What sampling finds, on the device and then on the host: one buffer, one copy.

int64    | token ids of rows | ranks    | likeliest tokens   |
4 bytes  | statuses          | logprobs | logprobs of these  |   as many numbers again
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling_batch import LogprobRows, SampledRows


@dataclass(frozen=True, slots=True)
class SamplingResults:
    """Views of one buffer; its numbers are undefined until kernels wrote them."""

    buffer: Tensor
    token_ids_R: Tensor  # int64
    ranks_L: Tensor  # int64
    top_token_ids_LN: Tensor  # int64
    statuses_R: Tensor  # int32
    logprobs_L: Tensor  # float32
    top_logprobs_LN: Tensor  # float32

    @classmethod
    def empty(
        cls, num_rows: int, num_told: int, most_top: int, device: torch.device
    ) -> SamplingResults:
        num_numbers = num_rows + num_told + num_told * most_top
        buffer = torch.empty(num_numbers + -(-num_numbers // 2), dtype=torch.int64, device=device)
        return cls.of(buffer, num_rows, num_told, most_top)

    @classmethod
    def of(cls, buffer: Tensor, num_rows: int, num_told: int, most_top: int) -> SamplingResults:
        sizes = [num_rows, num_told, num_told * most_top]
        num_numbers = sum(sizes)
        token_ids_R, ranks_L, top_token_ids = torch.split(buffer[:num_numbers], sizes)
        halves = buffer[num_numbers:].view(torch.int32)[:num_numbers]
        statuses_R, logprobs_L, top_logprobs = torch.split(halves, sizes)
        return cls(
            buffer,
            token_ids_R,
            ranks_L,
            top_token_ids.view(num_told, most_top),
            statuses_R,
            logprobs_L.view(torch.float32),
            top_logprobs.view(torch.float32).view(num_told, most_top),
        )

    def copy_to_host(self) -> PendingResults:
        """Of what the device will have written by then; does not wait for it."""
        device = self.buffer.device
        if device.type != "cuda":
            return PendingResults(self, None)
        host = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, pin_memory=True)
        host.copy_(self.buffer, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        (num_rows,), (num_told, most_top) = self.token_ids_R.shape, self.top_token_ids_LN.shape
        return PendingResults(SamplingResults.of(host, num_rows, num_told, most_top), copied)


@dataclass(frozen=True, slots=True)
class PendingResults:
    """On their way to the host."""

    on_host: SamplingResults  # undefined until `copied`
    copied: torch.cuda.Event | None  # None: from the start

    def wait(self) -> SampledRows:
        logprobs = self.wait_for_logprobs()
        return SampledRows(
            self.on_host.token_ids_R.numpy(),
            self.on_host.statuses_R.numpy(),
            logprobs if len(logprobs.ranks_L) > 0 else None,
        )

    def wait_for_logprobs(self) -> LogprobRows:
        if self.copied is not None:
            self.copied.synchronize()
        return LogprobRows(
            self.on_host.logprobs_L.numpy(),
            self.on_host.ranks_L.numpy(),
            self.on_host.top_token_ids_LN.numpy(),
            self.on_host.top_logprobs_LN.numpy(),
        )
