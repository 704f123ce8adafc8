"""The CPU as a GPU is treated: what would go wrong there, goes wrong here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from engine_service.compute_device import Upload
from engine_service.config import CacheConfig
from engine_service.cpu_device import CpuDevice
from engine_service.staged_upload import StagedUpload

T = TypeVar("T")

_CPU = CpuDevice()


class PretendUpload(StagedUpload):
    """Two memories. What was sent is spoilt on the host, and on the device what was not sent."""

    def __init__(self, num_bytes: int, mark: Callable[[], Callable[[], None]] = _CPU.mark) -> None:
        self.num_sent = 0
        self.num_larger = 0  # than the device's fixed place
        super().__init__(num_bytes, torch.device("cpu"), pin_memory=False, mark=mark)

    def send(self) -> torch.Tensor:
        self.num_sent += 1
        self.num_larger += self._larger is not None
        self.device_bytes.fill_(0x7F)
        written = self._buffers[self._next] if self._larger is None else self._larger
        sent = super().send()
        written.fill_(0x7F)
        return sent


class PretendGpu(CpuDevice):
    """`replay` calls what was captured, which reads the places that it read when it was captured,
    and answers in the place of the first answer."""

    overlaps = True
    replayed_kernels = ("triton", "reference")
    kernels = ("triton", "reference")
    takes_float8 = True

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self.uploads: list[PretendUpload] = []
        self.num_releases = 0

    @property
    def num_sent(self) -> int:
        return sum(upload.num_sent for upload in self.uploads)

    @property
    def num_larger(self) -> int:
        return sum(upload.num_larger for upload in self.uploads)

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
