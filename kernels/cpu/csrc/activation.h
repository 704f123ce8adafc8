#pragma once

#include <cstdint>

namespace firsttoken {

// silu(gate) * up, [F]; gate is the first half of gate_up, up the second.
void silu_mul_row(const float* gate_up_G, int64_t inner_size, float* out_F);

}  // namespace firsttoken
