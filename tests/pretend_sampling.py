"""Sampling as on a device with a memory of its own: what it is asked is read where it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.array_places import HostArray
from kernels.sampling_batch import (
    GivenTokens,
    PlannedRows,
    RowsUnderWay,
    SampledRows,
    SamplingBatch,
)
from kernels.sampling_ops import SamplingOps, reference_sampling_ops


@dataclass(slots=True)
class PretendSampling:
    num_downloads: int = 0
    kinds: set[str] = field(default_factory=set)  # of edits, as SamplingBatch names them

    def ops(self) -> SamplingOps:
        reference = reference_sampling_ops()
        return SamplingOps(
            reference.sample_rows, reference.token_logprobs, reference.random_uniforms, self.plan
        )

    def plan(
        self, batch: SamplingBatch, given: Sequence[GivenTokens], num_rows: int, vocab_size: int
    ) -> PlannedRows:
        asked = _Asked(batch, tuple(given))
        self.kinds |= {f.name for f in fields(batch) if getattr(batch, f.name) is not None}
        self.kinds |= {"given"} if given else set()
        return _Planned(self, asked, [HostArray(a.shape, a.dtype.type, [a]) for a in _all(asked)])


@dataclass(frozen=True, slots=True)
class _Asked:
    batch: SamplingBatch
    given: tuple[GivenTokens, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    pretended: PretendSampling
    asked: _Asked
    arrays: Sequence[HostArray]

    def launch(
        self, logits_RV: Tensor, on_device: Sequence[Tensor], given_logits: Iterable[Tensor] = ()
    ) -> _UnderWay:
        asked: _Asked = _with(self.asked, iter(on_device))
        on_host = reference_sampling_ops().plan(asked.batch, asked.given, *logits_RV.shape)
        rows = on_host.launch(logits_RV, (), given_logits)
        return _UnderWay(self.pretended, rows, rows.token_ids_R)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    pretended: PretendSampling
    rows: RowsUnderWay
    token_ids_R: Tensor

    def wait(self) -> SampledRows:
        self.pretended.num_downloads += 1
        return self.rows.wait()


def _all(value: Any) -> list[NDArray[Any]]:
    """The arrays in a dataclass of such, in the order of their fields."""
    if value is None:
        return []
    if is_dataclass(value):
        return [array for f in fields(value) for array in _all(getattr(value, f.name))]
    if isinstance(value, tuple):
        return [array for item in value for array in _all(item)]
    return [np.asarray(value)]


def _with(value: Any, sent: Iterator[Tensor]) -> Any:
    """The same with other arrays."""
    if value is None:
        return None
    if is_dataclass(value) and not isinstance(value, type):
        of_fields = {f.name: _with(getattr(value, f.name), sent) for f in fields(value)}
        return replace(value, **of_fields)
    if isinstance(value, tuple):
        return tuple(_with(item, sent) for item in value)
    array = next(sent)
    return array if isinstance(value, Tensor) else array.numpy()
