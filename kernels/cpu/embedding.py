"""Rows of the embedding, which is often the packed logits head itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.linear import PackedMatrix, unpack_rows


def embed(input_ids_T: Tensor, table_VH: PackedMatrix | Tensor) -> Tensor:
    """[T, H], a new tensor; as the head's products see the rows where the two are tied."""
    if isinstance(table_VH, Tensor):
        return F.embedding(input_ids_T, table_VH)
    return unpack_rows(table_VH, input_ids_T)
