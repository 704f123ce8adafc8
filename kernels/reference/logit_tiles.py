"""Logits of many rows, worked on some rows at a time: their temporaries stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_CPU_ROWS = 8  # 1.5 MiB with a vocabulary of 49,152


def row_tiles(logits_RV: Tensor, num_rows: int) -> Iterator[slice]:
    """Slices that cover `num_rows`; what is computed of a row must not depend on its tile."""
    size = _CPU_ROWS if logits_RV.device.type == "cpu" else max(num_rows, 1)
    for start in range(0, num_rows, size):
        yield slice(start, start + size)
