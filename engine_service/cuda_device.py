"""A CUDA GPU as a compute device: launched work runs in order, on one stream, beside the host.

    gpu_memory_utilization
    |<-------------------------------------------------------->|<- free ->|
    | held by others | weights | largest step |    KV cache    |

What the largest step needs beside the weights is found out by computing one. A captured step
(a CUDA graph) is one launch in place of hundreds. All graphs share one pool of memory: no two of
them run at once, and what one leaves is read before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine_service.compute_device import ComputeDevice, Upload
from engine_service.config import CacheConfig

T = TypeVar("T")

_NUM_WARM_UPS = 2  # before a capture: kernels are compiled and libraries loaded outside of it
_NUM_HOST_BUFFERS = 2  # one is written while the other is read


class PinnedUpload(Upload):
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self.host_bytes: list[NDArray[np.uint8]] = [buffer.numpy() for buffer in self._buffers]
        self._next = 0

    def begin(self) -> int:
        self._sent[self._next].synchronize()
        return self._next

    def send(self, num_bytes: int) -> None:
        buffer = self._buffers[self._next]
        self.device_bytes[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)
        self._sent[self._next].record()
        self._next = (self._next + 1) % _NUM_HOST_BUFFERS


class CudaDevice(ComputeDevice):
    overlaps = True
    replayed_kernels = ("triton",)  # torch's look at their inputs on the host
    kernels = ("triton", "reference")
    max_num_seqs = 256
    max_num_batched_tokens = 2048

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._graph_pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries keep a workspace for each stream that they ever saw.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    def auto_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The checkpoint's own, but for float32: half the bytes, twice the speed."""
        return torch.bfloat16 if checkpoint_dtype == torch.float32 else checkpoint_dtype

    def kv_cache_bytes(self, cache: CacheConfig, run_largest_step: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        allocated_bytes = torch.cuda.memory_allocated(self.torch_device)
        run_largest_step()
        torch.cuda.synchronize(self.torch_device)
        step_bytes = torch.cuda.max_memory_allocated(self.torch_device) - allocated_bytes
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        utilization = cache.gpu_memory_utilization
        return bytes_for_kv_cache(total_bytes, free_bytes, step_bytes, utilization)

    def new_upload(self, num_bytes: int) -> Upload:
        return PinnedUpload(num_bytes, self.torch_device)

    def capture(self, compute: Callable[[], T]) -> Callable[[], T]:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(_NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            result = compute()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def release_unused_memory(self) -> None:
        torch.cuda.empty_cache()


def bytes_for_kv_cache(
    total_bytes: int, free_bytes: int, step_bytes: int, utilization: float
) -> int:
    """What the device has for the KV cache when the weights are on it; never negative."""
    used_bytes = total_bytes - free_bytes
    return max(0, int(total_bytes * utilization) - used_bytes - step_bytes)
