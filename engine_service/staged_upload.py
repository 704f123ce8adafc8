"""The way to a device with a memory and a clock of its own: through buffers of the host's.

    host buffer 0   | write step 1 | read by the copy | write step 3 |
    host buffer 1                  | write step 2 | read by the copy |
    device bytes               copy 1 ->|        copy 2 ->|   in order with the steps' work

All of them stay where they are: captured steps read the device's. What is larger than they are has
memory of its own for that one time, here and there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engine_service.compute_device import Upload

_NUM_HOST_BUFFERS = 2  # one is written while the other is read


class StagedUpload(Upload):
    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        pin_memory: bool,
        mark: Callable[[], Callable[[], None]],  # as ComputeDevice.mark
    ) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pin_memory = pin_memory
        self._mark = mark
        self._buffers = [self._new_buffer(num_bytes) for _ in range(_NUM_HOST_BUFFERS)]
        self._host_bytes = [buffer.numpy() for buffer in self._buffers]
        self._waits = [mark() for _ in self._buffers]
        self._next = 0
        self._num_bytes = 0  # to be sent
        self._larger: torch.Tensor | None = None

    def begin(self, num_bytes: int) -> NDArray[np.uint8]:
        self._waits[self._next]()
        self._num_bytes, self._larger = num_bytes, None
        if num_bytes <= len(self.device_bytes):
            return self._host_bytes[self._next]
        self._larger = self._new_buffer(num_bytes)
        return self._larger.numpy()

    def send(self) -> torch.Tensor:
        sent = self.device_bytes
        if self._larger is None:
            buffer = self._buffers[self._next]
            sent[: self._num_bytes].copy_(buffer[: self._num_bytes], non_blocking=True)
        else:
            sent = torch.empty_like(self._larger, device=sent.device)
            sent.copy_(self._larger, non_blocking=True)
            self.device_bytes.copy_(sent[: len(self.device_bytes)])
        self._waits[self._next] = self._mark()
        self._next = (self._next + 1) % _NUM_HOST_BUFFERS
        return sent

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
