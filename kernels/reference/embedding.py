"""Rows of the embedding, by token id."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed(input_ids_T: Tensor, table_VH: Tensor) -> Tensor:
    """[T, H], a new tensor."""
    return F.embedding(input_ids_T, table_VH)
