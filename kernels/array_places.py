"""Arrays side by side in one buffer of bytes, which goes to a device, or comes from there, in one
copy:

    | what lies before them | array |  | array | array   |    | array |
                                       ^ each at a multiple of 16 bytes

Kernels are compiled for arrays that lie so: elsewhere, a kernel would be compiled once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TORCH_DTYPES: Final[dict[type[np.generic], torch.dtype]] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float64: torch.float64,
    np.float32: torch.float32,
}
_ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class PlacedArray:
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class HostArray(PlacedArray):
    """To be sent. Its numbers are those of `parts`, in order, or the first of them are: what they
    do not fill is undefined. They are converted to `dtype`, which must hold them, when written."""

    parts: Sequence[NDArray[Any]]

    def write(self, host_bytes: NDArray[np.uint8]) -> None:
        numbers = host_bytes.view(self.dtype)
        first = 0
        for part in self.parts:
            numbers[first : first + part.size] = part.ravel()
            first += part.size


@dataclass(frozen=True, slots=True)
class ArrayPlaces:
    """Where each array lies in a buffer."""

    arrays: Sequence[PlacedArray]
    slices: Sequence[slice]  # of bytes
    num_bytes: int  # of the buffer, up to the end of the last array

    @classmethod
    def behind(cls, num_bytes: int, arrays: Sequence[PlacedArray]) -> ArrayPlaces:
        """`num_bytes`: what lies before them."""
        slices = []
        for array in arrays:
            start = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            num_bytes = start + array.num_bytes
            slices.append(slice(start, num_bytes))
        return cls(arrays, slices, num_bytes)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays in it; [bytes], uint8."""
        return [
            buffer[place].view(TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, place in zip(self.arrays, self.slices, strict=True)
        ]


def upload(arrays: Sequence[HostArray], device: torch.device) -> list[Tensor]:
    """On their own, in one copy; does not wait for the device."""
    places = ArrayPlaces.behind(0, arrays)
    host = torch.empty(places.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, place in zip(arrays, places.slices, strict=True):
        array.write(host.numpy()[place])
    return places.views(host.to(device, non_blocking=True))
