#pragma once

#include <cstdint>

namespace firsttoken {

// x / sqrt(mean(x^2) + eps) * weight; x and out may be the same.
void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out);

}  // namespace firsttoken
