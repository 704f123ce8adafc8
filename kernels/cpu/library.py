"""The compiled kernels, loaded by ctypes: a call releases the GIL and needs no ABI but C's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import cast

from torch import Tensor

from kernels.cpu.build import build_library, machine_form

INT = ctypes.c_int64
FLOAT = ctypes.c_float
POINTER = ctypes.c_void_p

# For tests and measurements: another form than the fastest, of `build.machine_forms`.
FORM_VARIABLE = "FIRSTTOKEN_KERNEL_FORM"


def library() -> ctypes.CDLL:
    """Compiled if need be. Raises KernelBuildError."""
    return _library(kernel_form())


def kernel_form() -> str:
    """The machine's fastest, or what was asked for. Several may be loaded; each has its threads."""
    return os.environ.get(FORM_VARIABLE) or machine_form()


@cache
def _library(form: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_library(form)))


def function(
    name: str, argument_types: tuple[type, ...], result_type: type | None = None
) -> Callable[..., int]:
    """A function of the library by name. Its arguments are numbers, and addresses as integers."""
    return _function(kernel_form(), name, argument_types, result_type)


@cache
def _function(
    form: str, name: str, argument_types: tuple[type, ...], result_type: type | None
) -> Callable[..., int]:
    found = getattr(_library(form), name)
    found.argtypes = argument_types
    found.restype = result_type
    return cast("Callable[..., int]", found)


def address(tensor: Tensor | None) -> int | None:
    """Of the first element; None becomes a null pointer. The tensor must outlive the call."""
    return None if tensor is None else tensor.data_ptr()


def set_num_threads(num_threads: int) -> None:
    """How many threads compute, the caller's included; of the whole process."""
    function("ft_set_num_threads", (ctypes.c_int,))(num_threads)
