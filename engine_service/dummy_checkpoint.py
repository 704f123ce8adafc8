"""Random weights in place of a checkpoint's: for what is measured without downloading anything."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from engine_service.model_error import ModelError
from engine_service.model_loader import Checkpoint
from engine_service.models.config import DecoderConfig
from engine_service.models.weights import expected_shapes

LOAD_FORMATS: Final = ("auto", "dummy")
_DEVIATION: Final = 0.02  # of weights, as models are initialised


class WeightSource(Protocol):
    """What a decoder is loaded from."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def digest(self) -> str:
        """Hexadecimal; equal for equal weights."""

    def version(self) -> str:
        """The digest, and whatever else tells that weights have changed."""


class DummyCheckpoint(WeightSource):
    """The same numbers for the same model on the same device."""

    def __init__(self, model: DecoderConfig) -> None:
        self._shapes = expected_shapes(model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, _DEVIATION, generator=generator)

    def digest(self) -> str:
        return hashlib.sha256(f"dummy\0{self._shapes}".encode()).hexdigest()

    def version(self) -> str:
        return self.digest()


def open_checkpoint(
    model_dir: Path, load_format: str, model: DecoderConfig
) -> AbstractContextManager[WeightSource]:
    """Raises ModelError for a format that is unknown, or files that can't be read."""
    if load_format not in LOAD_FORMATS:
        raise ModelError(
            f"The load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}."
        )
    if load_format == "dummy":
        return nullcontext(DummyCheckpoint(model))
    return Checkpoint(model_dir)
