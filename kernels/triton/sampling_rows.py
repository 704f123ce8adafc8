"""Passes over one row of logits, [V]: what all of sampling is made of.

A row belongs to one program, which goes over it some tokens at a time; whatever it does follows
from the row alone. Weights are whole numbers in units of 2^-40 of the largest logit's, so that a
sum of them is exact in any order: neither the number of threads nor the size of a tile can change
a row's token. What weighs less than a unit weighs nothing; 2^22 tokens together stay below 2^63.

Logits at the places behind the vocabulary read as -inf, which weighs nothing.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LARGEST_VOCAB: Final = 2**22
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
UNITS_OF_LARGEST = tl.constexpr(2.0**40)
# How one is launched: enough loads at once to keep a row's memory busy; no product is fused with a
# sum, so that numbers are those of the reference.
PROGRAM_OPTIONS: Final = {"num_warps": 16, "enable_fp_fusion": False}


def tile_size(vocab_size: int) -> int:
    """Tokens that a program looks at at once."""
    return min(max(int(triton.next_power_of_2(vocab_size)), 128), 8192)


@triton.jit
def load_tile(row_V, start, count, TILE: tl.constexpr):
    ids = start + tl.arange(0, TILE)
    return tl.load(row_V + ids, mask=ids < count, other=float("-inf"))


@triton.jit
def scan_row(row_V, vocab_size, TILE: tl.constexpr):
    """(largest, its lowest id, smallest but for -inf, no NaN and no +inf, nor -inf).

    Meaningless numbers where there is a NaN. The last two are 0 or 1.
    """
    largest_T = tl.full([TILE], float("-inf"), tl.float32)
    smallest_T = tl.full([TILE], float("inf"), tl.float32)
    ids_T = tl.zeros([TILE], tl.int32)
    below_infinity_T = tl.full([TILE], 1, tl.int32)
    finite_T = tl.full([TILE], 1, tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = load_tile(row_V, start, vocab_size, TILE)
        is_number = logits > float("-inf")
        is_below = logits < float("inf")
        below_infinity_T &= is_below.to(tl.int32)
        finite_T &= ((is_number & is_below) | (ids >= vocab_size)).to(tl.int32)
        ids_T = tl.where(logits > largest_T, ids, ids_T)
        largest_T = tl.where(logits > largest_T, logits, largest_T)
        smallest_T = tl.where(is_number & (logits < smallest_T), logits, smallest_T)
    largest = tl.max(largest_T, axis=0)
    first_id = tl.min(tl.where(largest_T == largest, ids_T, 0x7FFFFFFF), axis=0)
    return (
        largest,
        first_id,
        tl.min(smallest_T, axis=0),
        tl.min(below_infinity_T, axis=0),
        tl.min(finite_T, axis=0),
    )


@triton.jit
def falls(logits, largest):
    """How far below the largest, at most the largest float."""
    return tl.minimum(largest - logits, LARGEST_FLOAT)


@triton.jit
def weigh(logits, largest, scale):
    """e^((logit - largest) * scale) in units, int64."""
    weights = tl.exp(-(falls(logits, largest) * scale)) * UNITS_OF_LARGEST
    return tl.where(logits > float("-inf"), weights, 0.0).to(tl.int64)


@triton.jit
def order_of(logits):
    """Int32 in the order of the logits; the same for equal ones, so for -0.0 and 0.0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_order(order):
    """The logit of an int32 of `order_of`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
