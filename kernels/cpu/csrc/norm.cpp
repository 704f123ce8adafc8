#include "norm.h"

#include <cmath>

#include "rows.h"
#include "simd.h"

namespace firsttoken {
namespace {

constexpr int kSums = 4;  // independent ones, so that additions need not wait for each other

float sum_of_squares(const float* x, int64_t size) {
  F8 sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) {
      const F8 value = load(x + i + s * kLanes);
      sums[s] = fma(value, value, sums[s]);
    }
  }
  for (int s = 0; i < size; ++s, i += kLanes) {
    const F8 value = load_some(x + i, size - i < kLanes ? static_cast<int>(size - i) : kLanes);
    sums[s] = fma(value, value, sums[s]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
  const float mean = sum_of_squares(x, size) / static_cast<float>(size);
  const F8 scale = broadcast(1.0f / std::sqrt(mean + eps));
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size) {
    const int rest = static_cast<int>(size - i);
    store_some(out + i, load_some(x + i, rest) * scale * load_some(weight + i, rest), rest);
  }
}

}  // namespace firsttoken

extern "C" {

void ft_rms_norm(const float* x, int64_t num_rows, int64_t size, const float* weight, float eps,
                 float* out) {
  using namespace firsttoken;
  PoolLease pool;
  for_each_row(*pool, num_rows, size, [&](int64_t row) {
    rms_norm_row(x + row * size, weight, size, eps, out + row * size);
  });
}

// Adds x to the residual, and norms the sum.
void ft_add_rms_norm(const float* x, float* residual, int64_t num_rows, int64_t size,
                     const float* weight, float eps, float* out) {
  using namespace firsttoken;
  PoolLease pool;
  for_each_row(*pool, num_rows, size, [&](int64_t row) {
    const float* x_row = x + row * size;
    float* residual_row = residual + row * size;
    for (int64_t i = 0; i < size; ++i) residual_row[i] += x_row[i];
    rms_norm_row(residual_row, weight, size, eps, out + row * size);
  });
}
}
