"""The CPU as a compute device: what is launched is over when the call returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine_service.compute_device import ComputeDevice, Upload
from engine_service.config import CacheConfig

T = TypeVar("T")

_DEFAULT_KV_BYTES = 2 * 1024**3
_SHARE_OF_AVAILABLE = 0.25


class HostUpload(Upload):
    """Host and device are one memory."""

    def __init__(self, num_bytes: int) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self._fixed: NDArray[np.uint8] = self.device_bytes.numpy()
        self._larger: NDArray[np.uint8] | None = None

    def begin(self, num_bytes: int) -> NDArray[np.uint8]:
        self._larger = None if num_bytes <= len(self._fixed) else np.empty(num_bytes, np.uint8)
        return self._fixed if self._larger is None else self._larger

    def send(self) -> torch.Tensor:
        if self._larger is None:
            return self.device_bytes
        self._fixed[:] = self._larger[: len(self._fixed)]
        return torch.from_numpy(self._larger)


class CpuDevice(ComputeDevice):
    torch_device = torch.device("cpu")
    overlaps = False
    replayed_kernels: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("cpu", "reference")
    takes_float8 = False
    max_num_seqs = 64
    max_num_batched_tokens = 256

    def auto_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # the fastest here

    def kv_cache_bytes(self, cache: CacheConfig, run_largest_step: Callable[[], None]) -> int:
        """The smaller of 2 GiB and a quarter of what is available."""
        return min(_DEFAULT_KV_BYTES, int(_available_bytes() * _SHARE_OF_AVAILABLE))

    def new_upload(self, num_bytes: int) -> Upload:
        return HostUpload(num_bytes)

    def capture(self, compute: Callable[[], T]) -> Callable[[], T]:
        return compute

    def mark(self) -> Callable[[], None]:
        return _nothing

    def release_unused_memory(self) -> None:
        pass


def _nothing() -> None:
    pass


def _available_bytes() -> int:
    """Memory that can be had without swapping: the machine's, or less where a cgroup limits it."""
    available = _meminfo_available_bytes()
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return available
    return min(available, max(0, limit - used))


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _DEFAULT_KV_BYTES
