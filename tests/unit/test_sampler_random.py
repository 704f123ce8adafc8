"""The generator is Philox4x32-10, exactly, and its uniforms behave."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference.random_uniform import philox4x32, random_uniforms
from kernels.sampling_batch import Floats

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
            (ALL_ONES, ALL_ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    counters = np.array(counter, np.uint64).reshape(4, 1)
    keys = np.array([key[0] | key[1] << 32], np.uint64)
    assert philox4x32(counters, keys)[:, 0].tolist() == list(words)


def uniforms(seeds: list[int], sample_indices: list[int], positions: list[int]) -> Floats:
    return random_uniforms(
        np.array(seeds, np.uint64), np.array(sample_indices), np.array(positions)
    )


def test_uniforms_are_uniform_and_inside() -> None:
    count = 20_000
    values = uniforms([99] * count, [0] * count, list(range(count)))
    assert values.min() > 0
    assert values.max() < 1
    buckets = np.bincount((values * 20).astype(int), minlength=20)
    chi_squared = float(((buckets - count / 20) ** 2 / (count / 20)).sum())
    assert chi_squared < 50  # 19 degrees of freedom; the 0.01 % quantile
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.03


def test_neighbouring_keys_and_counters_are_unrelated() -> None:
    seeds = uniforms(list(range(5000)), [0] * 5000, [0] * 5000)
    samples = uniforms([1] * 5000, list(range(5000)), [0] * 5000)
    for values in (seeds, samples):
        assert abs(float(values.mean()) - 0.5) < 0.02
        assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.05


def test_a_value_depends_on_its_own_key_and_counter_only() -> None:
    alone = [uniforms([s], [i], [p])[0] for s, i, p in ((5, 0, 3), (2**64 - 1, 2, 0), (0, 1, 9))]
    assert uniforms([5, 2**64 - 1, 0], [0, 2, 1], [3, 0, 9]).tolist() == alone
