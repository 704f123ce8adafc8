"""What the engine needs of the hardware that it computes on, and which one it is.

    host      | write inputs | launch |  plan the next step  | wait |
    upload            one copy ->
    device                      | forward, sampling |
    download                                     <- one copy

A CPU computes when it is asked to, in the memory that the host writes: nothing is copied, nothing
captured, nothing waited for. A GPU has a clock of its own (`cuda_device.py`). Whatever else differs
between the two is in `kernels/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_service.config import CacheConfig, CoreConfig
from engine_service.model_error import ModelError

T = TypeVar("T")


class Upload(Protocol):
    """Bytes that go to the device in one copy for each step."""

    device_bytes: Tensor  # uint8; of fixed size and place

    def begin(self, num_bytes: int) -> NDArray[np.uint8]:
        """What is to be written for the next `send`: one of the host's buffers, or another if they
        are too small. Waits until nothing reads what was sent from there before."""

    def send(self) -> Tensor:
        """So many of the first bytes, in order with what else is launched. Returns where they are
        on the device until the next; in `device_bytes` are as many as fit."""


class ComputeDevice(Protocol):
    torch_device: torch.device
    overlaps: bool  # it computes beside the host
    replayed_kernels: tuple[str, ...]  # whose steps can be captured, and cost the host less then
    kernels: tuple[str, ...]  # that can compute here, the best first; see decoder_loader.py
    takes_float8: bool  # its matrix units do
    max_num_seqs: int  # that suit it, if nobody says
    max_num_batched_tokens: int

    def auto_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """What a model is computed in if nobody says."""

    def kv_cache_bytes(self, cache: CacheConfig, run_largest_step: Callable[[], None]) -> int:
        """What is left for the KV cache once the weights are loaded. `run_largest_step` computes
        as much at once as a step ever will."""

    def new_upload(self, num_bytes: int) -> Upload: ...

    def capture(self, compute: Callable[[], T]) -> Callable[[], T]:
        """What computes the same again, from the same places into the same places.

        `compute` is called, perhaps more than once."""

    def mark(self) -> Callable[[], None]:
        """Waits, when called, until what was launched before this is over."""

    def release_unused_memory(self) -> None:
        """After a step that found too little of it."""


def pick_device(name: str) -> ComputeDevice:
    """auto: CUDA where torch sees it. Raises ModelError for what is unknown or not there."""
    from engine_service.cpu_device import CpuDevice
    from engine_service.cuda_device import CudaDevice

    if name not in ("auto", "cpu", "cuda"):
        raise ModelError(f"The device {name!r} is not one of auto, cpu, cuda.")
    if name == "cuda" and not CudaDevice.is_available():
        raise ModelError("The device cuda was asked for, but torch sees none.")
    if name == "cuda" or (name == "auto" and CudaDevice.is_available()):
        return CudaDevice()
    return CpuDevice()


def sized_for(config: CoreConfig, device: ComputeDevice) -> CoreConfig:
    """With the device's own steps where the config leaves them open."""
    scheduler = config.scheduler
    scheduler = msgspec.structs.replace(
        scheduler,
        max_num_seqs=scheduler.max_num_seqs or device.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or device.max_num_batched_tokens,
    )
    return msgspec.structs.replace(config, scheduler=scheduler)
