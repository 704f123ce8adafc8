"""The product of two tiles, of which matrix products and attention are made, and its end."""

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


@triton.jit
def store_product(sums, bias_ptr, out_ptr, rows, outputs, num_rows, NUM_OUTPUTS: tl.constexpr):
    """Writes a tile of x @ matrix.T, and adds the bias of its outputs unless that is None."""
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_ptrs, sums, mask=is_row[:, None] & is_output[None, :])
