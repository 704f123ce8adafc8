"""What bounds everything else on a GPU: memory's bandwidth and the matrix units' arithmetic."""

from __future__ import annotations

from typing import Final

import torch

from engine_service.bench_gpu_items import Figures, Item
from engine_service.bench_gpu_timing import device_seconds

_COPY_BYTES: Final = 4 << 30
_SIDE: Final = 8192


def items() -> list[Item]:
    return [Item("copy", _copy), Item("matmul", _matmul)]


def _copy() -> Figures:
    """Bytes read and written."""
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = device_seconds(lambda: target.copy_(source))
    return {"gb_s": 2 * _COPY_BYTES / seconds * 1e-9}


def _matmul() -> Figures:
    a, b = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    seconds = device_seconds(lambda: torch.matmul(a, b, out=out))
    return {"tflop_s": 2 * _SIDE**3 / seconds * 1e-12}
