"""Arrays side by side in one buffer."""

from __future__ import annotations

import numpy as np
import torch

from kernels.array_places import ArrayPlaces, HostArray, upload


def arrays() -> list[HostArray]:
    return [
        HostArray((3,), np.int32, [np.array([1]), np.array([2, 3])]),
        HostArray((2, 2), np.float64, [np.array([[0.5, 1.5], [2.5, 3.5]])]),
        HostArray((0, 4), np.int32, [np.empty((0, 4), np.int32)]),
        HostArray((5,), np.int64, [np.array([7, 8])]),  # the others are undefined
        HostArray((1,), np.float32, [np.array([0.25])]),
    ]


def test_each_lies_at_a_multiple_of_16_bytes_behind_what_comes_before() -> None:
    places = ArrayPlaces.behind(5, arrays())
    assert places.slices == [
        slice(16, 28),
        slice(32, 64),
        slice(64, 64),
        slice(64, 104),
        slice(112, 116),
    ]
    assert places.num_bytes == 116


def test_numbers_arrive_in_their_shape_and_dtype() -> None:
    ints, doubles, none, partly, singles = upload(arrays(), torch.device("cpu"))
    assert (ints.tolist(), ints.dtype) == ([1, 2, 3], torch.int32)
    assert (doubles.tolist(), doubles.dtype) == ([[0.5, 1.5], [2.5, 3.5]], torch.float64)
    assert (none.shape, none.dtype) == ((0, 4), torch.int32)
    assert (partly[:2].tolist(), partly.shape, partly.dtype) == ([7, 8], (5,), torch.int64)
    assert (singles.tolist(), singles.dtype) == ([0.25], torch.float32)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (ints, doubles, partly, singles))
    assert len({tensor.untyped_storage().data_ptr() for tensor in (ints, doubles, singles)}) == 1
