"""A checkpoint's matrices in the CPU kernels' packed form: made once, then memory-mapped.

    <cache>/packed/<key>   | head | layers.0.qkv | layers.0.output | ...     64-byte aligned

The key is made of the checkpoint's version, the quantization and the packed layout's version. The
file is built beside its place and renamed; of two engines that start at once the second waits.

`int4` keeps the logits head in int8: its errors would reach every token directly.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine_service.models.weights import HEAD, LoadTensor, MatrixSpec
from kernels.cpu.linear import (
    ALIGNMENT,
    LAYOUT_VERSION,
    PackedMatrix,
    Quantization,
    pack_matrix,
    packed_bytes,
    unpack_rows,
)

_OUTPUTS_LOOKED_AT: Final = 64
_ROUNDING: Final = 1e-3  # of the largest weight: a step of four bits is 60 times that

_log = logging.getLogger(__name__)


def quantization_of(spec: MatrixSpec, quantization: Quantization) -> Quantization:
    return "int8" if quantization == "int4" and spec.name == HEAD else quantization


def pack_in_memory(
    specs: Mapping[str, MatrixSpec], quantization: Quantization, load: LoadTensor
) -> dict[str, PackedMatrix]:
    return {
        name: pack_matrix(spec.load(load), quantization_of(spec, quantization))
        for name, spec in _with_progress(specs)
    }


def is_on_int4_grid(specs: Mapping[str, MatrixSpec], load: LoadTensor) -> bool:
    """Whether int4 holds the weights as they are, up to rounding: those that were made from four
    bits, in groups of 32, do. Looks at some of the matrices that would be int4."""
    names = [name for name in specs if quantization_of(specs[name], "int4") == "int4"]
    picked = {names[len(names) * place // 4] for place in range(4)}
    return all(_survives_int4(specs[name].load(load)[:_OUTPUTS_LOOKED_AT]) for name in picked)


def _survives_int4(weight_OI: Tensor) -> bool:
    packed = pack_matrix(weight_OI, "int4")
    seen_OI = unpack_rows(packed, torch.arange(weight_OI.shape[0]))
    limit = _ROUNDING * float(weight_OI.abs().max())
    return bool((seen_OI - weight_OI).abs().max() <= limit)


class PackedWeightsCache:
    """The packed files of one checkpoint."""

    def __init__(
        self,
        directory: Path,
        checkpoint_version: str,
        specs: Mapping[str, MatrixSpec],
        load: LoadTensor,
    ) -> None:
        self._directory = directory
        self._version = checkpoint_version
        self._specs = specs
        self._load = load

    def open(self, quantization: Quantization) -> dict[str, PackedMatrix]:
        """Packs first if need be. Matrices whose file can't be written are packed in memory."""
        path = self._path(quantization)
        spans = _spans(self._specs, quantization)
        try:
            if not _has_size(path, spans):
                self._write(path, quantization, spans)
            return self._map(path, quantization, spans)
        except OSError as error:
            _log.warning("%s can't be used (%s): packing the weights in memory", path, error)
            return pack_in_memory(self._specs, quantization, self._load)

    def _path(self, quantization: str) -> Path:
        key = f"{self._version}\0{quantization}\0{LAYOUT_VERSION}"
        return self._directory / hashlib.sha256(key.encode()).hexdigest()[:32]

    def _write(self, path: Path, quantization: Quantization, spans: Mapping[str, range]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _has_size(path, spans):
                return
            start = time.monotonic()
            partial = path.with_suffix(".partial")
            try:
                with partial.open("wb") as file:
                    for name, spec in _with_progress(self._specs):
                        form = quantization_of(spec, quantization)
                        file.seek(spans[name].start)
                        file.write(pack_matrix(spec.load(self._load), form).data.numpy().data)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)
            seconds = time.monotonic() - start
            _log.info("packed the weights as %s in %.1f s, once", quantization, seconds)

    def _map(
        self, path: Path, quantization: Quantization, spans: Mapping[str, range]
    ) -> dict[str, PackedMatrix]:
        data = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
        return {
            name: PackedMatrix(
                quantization_of(spec, quantization),
                spec.num_outputs,
                spec.num_inputs,
                data[spans[name].start : spans[name].stop],
            )
            for name, spec in self._specs.items()
        }


def _spans(specs: Mapping[str, MatrixSpec], quantization: Quantization) -> dict[str, range]:
    """The bytes of each matrix in the file."""
    spans: dict[str, range] = {}
    end = 0
    for name, spec in specs.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        form = quantization_of(spec, quantization)
        end = start + packed_bytes(spec.num_outputs, spec.num_inputs, form)
        spans[name] = range(start, end)
    return spans


def _has_size(path: Path, spans: Mapping[str, range]) -> bool:
    """Whether the file is there, and whole."""
    try:
        return path.stat().st_size == max(span.stop for span in spans.values())
    except FileNotFoundError:
        return False


def _with_progress(specs: Mapping[str, MatrixSpec]) -> Iterator[tuple[str, MatrixSpec]]:
    """A bar on a terminal; in a log, what takes long says so when it is done."""
    disable = not sys.stderr.isatty()
    yield from tqdm(specs.items(), desc="Packing the weights", unit="matrix", disable=disable)
