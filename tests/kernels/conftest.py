"""Where Triton's kernels run in tests: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

# Triton reads it as functions are decorated: its own when it is imported, ours when they are.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Of the tensors that Triton's kernels get."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def products_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter a product of tiles that has the same bits for a row at every place.

    That is taken for granted of a GPU's matrix instructions, and is not so of numpy's.
    """

    def matmul(
        a: np.ndarray[tuple[int, int], np.dtype[np.generic]],
        b: np.ndarray[tuple[int, int], np.dtype[np.generic]],
        dtype: np.dtype[np.float32],
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        sums = np.zeros((a.shape[0], b.shape[1]), dtype)
        for column, row in zip(a.astype(dtype).T, b.astype(dtype), strict=True):
            sums += column[:, None] * row
        return sums

    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", matmul)
