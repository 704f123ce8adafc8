"""The product of two tiles, of which matrix products and attention are made."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter would multiply the bit patterns of bfloat16 numbers.
_WIDENS_BFLOAT16 = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, sums):
    """sums + a @ b in float32: [M, K] @ [K, N]. Products of float32 are not shortened to tf32."""
    if _WIDENS_BFLOAT16 and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
