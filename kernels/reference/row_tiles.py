"""Products in tiles of proven heights: a row's bits do not depend on how many rows there are.

A library chooses its code by the shape of a product: the same row at M = 1 and at M = 4 differs in
its last bits. So rows are computed in tiles of a few fixed heights only, the last one filled up:

    rows     |<------ 128 ------>|<-- 9 -->|
    tiles    [       128         ][   16   ]     7 rows of the second are zeros, and dropped

Which heights give a row the same bits, wherever in the tile it lies, is a property of the library,
the machine and the number of threads, not of the numbers: it is found out once, on the products
that will be computed, and heights that do not agree are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEIGHTS = (8, 16, 24, 32, 48, 64, 96, 128)

Product = Callable[[Tensor], Tensor]  # [..., rows, I] -> [..., rows, O], each row for itself


class NotBatchInvariant(Exception):
    """On this machine a row of a product depends on its place even in tiles of one height."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    heights: tuple[int, ...]  # ascending; a row has the same bits in each

    def spans(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, height) of each tile: the highest, then the lowest that takes the rest."""
        highest = self.heights[-1]
        for start in range(0, max(1, num_rows), highest):  # no rows: one tile of none
            stop = min(start + highest, num_rows)
            yield start, stop, next(h for h in self.heights if h >= stop - start)

    def apply(self, product: Product, x_XTI: Tensor) -> Tensor:
        """product(x), [X, T, O]."""
        tiles = [
            product(fill_rows(x_XTI[..., start:stop, :], height))[..., : stop - start, :]
            for start, stop, height in self.spans(x_XTI.shape[-2])
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-2)


def fill_rows(x_XTI: Tensor, height: int) -> Tensor:
    """x followed by rows of zeros, [X, height, I], contiguous."""
    num_rows = x_XTI.shape[-2]
    if num_rows == height:
        return x_XTI.contiguous()
    filled_XTI = x_XTI.new_zeros((*x_XTI.shape[:-2], height, x_XTI.shape[-1]))
    filled_XTI[..., :num_rows, :] = x_XTI
    return filled_XTI


def prove_tiles(products: Iterable[tuple[Sequence[Product], Tensor]]) -> RowTiles:
    """Tries each product with one row ([..., 1, I]) at every place of a tile of each height.

    A product comes in all forms in which it will be computed, whose results may have dimensions
    before those of the first's. Raises NotBatchInvariant if not even the lowest height gives the
    same bits everywhere and in every form.
    """
    heights: tuple[int, ...] = HEIGHTS
    for forms, row_X1I in products:
        expected_X1O = forms[0](fill_rows(row_X1I, HEIGHTS[0]))[..., :1, :]
        heights = tuple(
            h for h in heights if all(_agrees(form, row_X1I, h, expected_X1O) for form in forms)
        )
    if HEIGHTS[0] not in heights:
        raise NotBatchInvariant
    return RowTiles(heights)


def _agrees(product: Product, row_X1I: Tensor, height: int, expected_X1O: Tensor) -> bool:
    rows_XTI = row_X1I.expand(*row_X1I.shape[:-2], height, -1).contiguous()
    y_XTO = product(rows_XTI)
    return torch.equal(y_XTO, expected_X1O.expand_as(y_XTO))
