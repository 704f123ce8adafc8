"""Triton's compiler without a GPU: the interpreter accepts kernels that it does not.

For a process of its own, in which Triton's interpreter is off.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _HopperDriver:
    """What Triton asks of a driver before it loads a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead_of_launching() -> list[str]:
    """From now on, a launch compiles its kernel for an H100 and does nothing else.

    Returns the list to which each launch adds its kernel's name.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter is on")
    compiled: list[str] = []

    def launcher(kernel: JITFunction, grid: tuple[int, ...]) -> object:
        def compile_kernel(*args: object, **options: object) -> None:
            kernel.run(*args, grid=grid, warmup=True, **options)
            compiled.append(kernel.fn.__name__)

        return compile_kernel

    driver.set_active(_HopperDriver())
    JITFunction.__getitem__ = launcher
    return compiled
