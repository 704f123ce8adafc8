"""The CPU as a GPU is treated: what would go wrong there, goes wrong here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from engine_service.compute_device import Upload
from engine_service.config import CacheConfig
from engine_service.cpu_device import CpuDevice

T = TypeVar("T")


class PretendUpload(Upload):
    """Two memories. What was sent is spoilt on the host, and on the device what was not sent."""

    def __init__(self, num_bytes: int) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.host_bytes = [np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)]
        self.num_sent = 0

    def begin(self) -> int:
        return self.num_sent % 2

    def send(self, num_bytes: int) -> None:
        host = self.host_bytes[self.begin()]
        self.num_sent += 1
        self.device_bytes.fill_(0x7F)
        self.device_bytes[:num_bytes] = torch.from_numpy(host[:num_bytes])
        host[:] = 0x7F


class PretendGpu(CpuDevice):
    """`replay` calls what was captured, which reads the places that it read when it was captured,
    and answers in the place of the first answer."""

    overlaps = True
    replayed_kernels = ("triton", "reference")
    kernels = ("triton", "reference")

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self.uploads: list[PretendUpload] = []
        self.num_releases = 0

    def kv_cache_bytes(self, cache: CacheConfig, run_largest_step: Callable[[], None]) -> int:
        run_largest_step()
        return 1 << 20

    def new_upload(self, num_bytes: int) -> Upload:
        self.uploads.append(PretendUpload(num_bytes))
        return self.uploads[-1]

    def capture(self, compute: Callable[[], T]) -> Callable[[], T]:
        self.num_captured += 1
        result = compute()
        assert isinstance(result, torch.Tensor)

        def replay() -> T:
            self.num_replayed += 1
            result.copy_(compute())  # type: ignore[arg-type]
            return result

        return replay

    def release_unused_memory(self) -> None:
        self.num_releases += 1
