"""The random numbers of sampling: one uniform per token, a pure function of its place.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): ten rounds of
multiply and xor turn a counter into four random words under a key. Here

    key      the request's seed, 64 bits
    counter  (position, sample index, 0, 0); position = number of output tokens before this one

and the first word w gives (w + 0.5) / 2^32. So a seed means one text, whatever else is in the
batch, in whichever row, however often the request was preempted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.sampling_batch import Floats, Ints

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_2 = np.uint64(0xCD9E8D57)
_KEY_STEP_LOW = np.uint64(0x9E3779B9)
_KEY_STEP_HIGH = np.uint64(0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_NUM_ROUNDS = 10


def random_uniforms(seeds: NDArray[np.uint64], sample_indices: Ints, positions: Ints) -> Floats:
    """[len(seeds)], each strictly between 0 and 1. Counters are taken modulo 2^32."""
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = positions.astype(np.uint64) & _LOW_32
    counter[1] = sample_indices.astype(np.uint64) & _LOW_32
    words = philox4x32(counter, seeds)[0].astype(np.float64)
    return np.asarray((words + 0.5) / 2.0**32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[4, n] counters of 32-bit words under [n] keys of 64 bits -> [4, n] random words."""
    c0, c1, c2, c3 = counter
    key_low, key_high = key & _LOW_32, key >> _SHIFT_32
    for _ in range(_NUM_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0, c1, c2, c3 = (
            (product_2 >> _SHIFT_32) ^ c1 ^ key_low,
            product_2 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ key_high,
            product_0 & _LOW_32,
        )
        key_low = (key_low + _KEY_STEP_LOW) & _LOW_32
        key_high = (key_high + _KEY_STEP_HIGH) & _LOW_32
    return np.stack((c0, c1, c2, c3))
