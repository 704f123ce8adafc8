"""The ops whose plain form depends on a step's composition, in a form that does not.

    projections, head   products in tiles of proven heights (`row_tiles`); a bias is added after
    attention           such tiles, and sums by absolute position (`split_attention`)
    activation          calls too small to be divided among threads in the middle of a row

All else computes each row, or each number, for itself anyway. So the bits of a token's hidden
state follow from it and the tokens before it alone: the same in any batch, cut into any chunks,
computed now or found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.reference.activation import silu_mul
from kernels.reference.linear import linear
from kernels.reference.row_tiles import Product, RowTiles, prove_tiles
from kernels.reference.split_attention import (
    DIVIDED_FROM_ELEMENTS,
    SPLIT_KEYS,
    SplitAttention,
    split_product,
)

# Among how many others a split's product is proven: few and many for the threads to share.
SPLIT_COUNTS = (1, 2, 3, 7, 32)


class BatchInvariantOps:
    """Raises NotBatchInvariant where this machine's products can't be had in this form.

    `matrices_OI`: one of every shape that `linear` and `logits_head` will get.
    """

    def __init__(self, matrices_OI: Sequence[Tensor], num_kv_heads: int, head_dim: int) -> None:
        device = matrices_OI[0].device
        self._tiles: RowTiles = prove_tiles(
            [*_projections(matrices_OI), *_attention_products(num_kv_heads, head_dim, device)]
        )
        self.paged_attention = SplitAttention(self._tiles).paged_attention

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        y_TO = self._tiles.apply(lambda tile: linear(tile, weight_OI, None), x_TI)
        return y_TO if bias_O is None else y_TO + bias_O

    def logits_head(self, hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
        return self.linear(hidden_RH, weight_VH, None).float()

    def silu_mul(self, gate_up_TG: Tensor) -> Tensor:
        num_rows = max(1, (DIVIDED_FROM_ELEMENTS - 1) // (gate_up_TG.shape[1] // 2))
        return torch.cat([silu_mul(part) for part in torch.split(gate_up_TG, num_rows)])


def _projections(matrices_OI: Sequence[Tensor]) -> Iterator[tuple[list[Product], Tensor]]:
    for weight_OI in matrices_OI:
        row_1I = _random(1, weight_OI.shape[1], device=weight_OI.device).to(weight_OI.dtype)
        yield [_times(weight_OI)], row_1I


def _times(weight_OI: Tensor) -> Product:
    return lambda x_TI: linear(x_TI, weight_OI, None)


def _attention_products(
    num_kv_heads: int, head_dim: int, device: torch.device
) -> Iterator[tuple[list[Product], Tensor]]:
    kv_1KSD = _random(1, num_kv_heads, SPLIT_KEYS, head_dim, device=device)
    query_1K1D = _random(1, num_kv_heads, 1, head_dim, device=device)
    weights_1K1S = _random(1, num_kv_heads, 1, SPLIT_KEYS, device=device)
    repeated = [kv_1KSD.repeat(count, 1, 1, 1) for count in SPLIT_COUNTS]
    yield [_of_splits(kv_CKSD.transpose(2, 3)) for kv_CKSD in repeated], query_1K1D
    yield [_of_splits(kv_CKSD) for kv_CKSD in repeated], weights_1K1S


def _of_splits(matrices_CKIO: Tensor) -> Product:
    num_splits = len(matrices_CKIO)
    return lambda rows_1KXI: split_product(rows_1KXI.expand(num_splits, -1, -1, -1), matrices_CKIO)


def _random(*shape: int, device: torch.device) -> Tensor:
    """Any numbers will do, as long as they have many bits."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)
