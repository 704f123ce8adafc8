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

import torch

from engine_service.compute_device import ComputeDevice, Upload
from engine_service.config import CacheConfig
from engine_service.staged_upload import StagedUpload

T = TypeVar("T")

_AMPERE = (8, 0)  # compute capability
_FLOAT8_CAPABILITY = (8, 9)  # Ada's and Hopper's
_NUM_WARM_UPS = 2  # before a capture: kernels are compiled and libraries loaded outside of it


class CudaDevice(ComputeDevice):
    overlaps = True
    replayed_kernels = ("triton",)  # torch's look at their inputs on the host
    max_num_seqs = 256
    max_num_batched_tokens = 2048

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._capability = torch.cuda.get_device_capability(self.torch_device)
        self.kernels = kernels_for(self._capability)
        self.takes_float8 = self._capability >= _FLOAT8_CAPABILITY
        self._graph_pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries keep a workspace for each stream that they ever saw.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    def auto_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return dtype_for(self._capability, checkpoint_dtype)

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
        return StagedUpload(num_bytes, self.torch_device, pin_memory=True, mark=self.mark)

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


def kernels_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """Triton compiles for Ampere and what came after it."""
    return ("triton", "reference") if capability >= _AMPERE else ("reference",)


def dtype_for(capability: tuple[int, int], checkpoint_dtype: torch.dtype) -> torch.dtype:
    """The checkpoint's own, but for float32: half the bytes, twice the speed. float16 where the
    matrix units don't take bfloat16."""
    if checkpoint_dtype == torch.float16 or capability < _AMPERE:
        return torch.float16
    return torch.bfloat16


def bytes_for_kv_cache(
    total_bytes: int, free_bytes: int, step_bytes: int, utilization: float
) -> int:
    """What the device has for the KV cache when the weights are on it; never negative."""
    used_bytes = total_bytes - free_bytes
    return max(0, int(total_bytes * utilization) - used_bytes - step_bytes)
