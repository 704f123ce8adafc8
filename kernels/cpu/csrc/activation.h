#pragma once

#include <cstdint>

#include "simd.h"

namespace firsttoken {

inline F8 silu_mul(F8 gate, F8 up) { return gate / (exp(-gate) + 1.0f) * up; }

// silu(gate) * up, [F]; gate is the first half of gate_up, up the second.
void silu_mul_row(const float* gate_up_G, int64_t inner_size, float* out_F);

}  // namespace firsttoken
