"""Weights from safetensors files, memory-mapped, and nothing but the expected ones.

What a checkpoint holds is compared with what the decoder needs before any tensor is read: a
missing, surplus or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_service.model_error import ModelError

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_MAX_NAMES_SHOWN = 5


class _TensorSlice(Protocol):
    def get_shape(self) -> list[int]: ...


class _TensorFile(Protocol):
    """What safetensors gives, which carries no types."""

    def __enter__(self) -> _TensorFile: ...
    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _TensorSlice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """The safetensors files of one model directory, open for as long as the `with` block."""

    def __init__(self, model_dir: Path) -> None:
        self._paths = _weight_files(model_dir)
        self._open_files = ExitStack()
        self._file_of: dict[str, _TensorFile] = {}
        try:
            for path in self._paths:
                file = cast(_TensorFile, safe_open(path, framework="pt"))
                self._open_files.enter_context(file)
                self._file_of.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            self._open_files.close()
            raise ModelError(f"The weights in {model_dir} cannot be read: {error}.") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open_files.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()
        }

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that `check_shapes` has seen; mapped, not copied, where nothing changes."""
        return self._file_of[name].get_tensor(name).to(dtype=dtype, device=device)

    def digest(self) -> str:
        """SHA-256 over each file's name, size and header and 64 pages of 4 KiB spread evenly.

        Equal for equal files. Cheap at any size: it tells checkpoints apart, and would miss a
        change of single weights that leaves name, shape and all sampled pages alone.
        """
        sha = hashlib.sha256()
        for path in self._paths:
            size = path.stat().st_size
            sha.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                sha.update(file.read(header_bytes))
                for i in range(_SAMPLES_PER_FILE):
                    file.seek(size * i // _SAMPLES_PER_FILE)
                    sha.update(file.read(_SAMPLE_BYTES))
        return sha.hexdigest()

    def version(self) -> str:
        """The digest, and when each file was changed: for what is made of every weight and kept."""
        times = [str(path.stat().st_mtime_ns) for path in self._paths]
        return "\0".join((self.digest(), *times))


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: frozenset[str],
) -> None:
    """Raises ModelError naming tensors that are missing, unexpected or of a wrong shape."""
    missing = expected.keys() - found.keys()
    if missing:
        raise ModelError(f"The checkpoint lacks {_names(missing)}.")
    unexpected = found.keys() - expected.keys() - ignored
    if unexpected:
        raise ModelError(f"The checkpoint holds tensors of no use here: {_names(unexpected)}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"The tensor {name} has the shape {list(found[name])}; "
                f"the configuration asks for {list(shape)}."
            )


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX_NAME
    if index.exists():
        names = _files_of_index(index)
    elif (model_dir / _SINGLE_NAME).exists():
        names = [_SINGLE_NAME]
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{model_dir} holds no safetensors weights; pickle files are not read.")
    absent = [name for name in names if not (model_dir / name).is_file()]
    if absent:
        raise ModelError(f"{model_dir} lacks the weight files {_names(absent)}.")
    return [model_dir / name for name in names]


def _files_of_index(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a usable index of weight files.") from error
    if not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
        raise ModelError(f"{index} names weight files outside of its directory.")
    return names


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_MAX_NAMES_SHOWN])
    more = len(ordered) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
