#include <algorithm>
#include <cstring>

#include "linear_tiles.h"
#include "simd.h"

namespace firsttoken {
namespace {

constexpr int kRowsAtOnce = 6;  // 12 sums, and what is multiplied: most of 16 registers
constexpr int kHalves = kTileOutputs / kLanes;
// All rows are multiplied with so many inputs' weights, 8 KiB, while memory delivers the next ones.
constexpr int64_t kChunkInputs = 128;

// y += x . W^T for some inputs of some rows.
template <int kRows>
void add_products(const float* weight_I16, int64_t num_inputs, const float* x, int64_t x_stride,
                  float* y_R16) {
  F8 sums[kRows][kHalves];
  for (int r = 0; r < kRows; ++r) {
    for (int half = 0; half < kHalves; ++half) {
      sums[r][half] = load(y_R16 + r * kTileOutputs + half * kLanes);
    }
  }
  for (int64_t i = 0; i < num_inputs; ++i) {
    const float* const weights = weight_I16 + i * kTileOutputs;
    __builtin_prefetch(weights + kChunkInputs * kTileOutputs);
    const F8 w0 = load(weights), w1 = load(weights + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const F8 repeated = broadcast(x[r * x_stride + i]);
      sums[r][0] = fma(repeated, w0, sums[r][0]);
      sums[r][1] = fma(repeated, w1, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int half = 0; half < kHalves; ++half) {
      store(y_R16 + r * kTileOutputs + half * kLanes, sums[r][half]);
    }
  }
}

constexpr decltype(&add_products<1>) kAddProducts[] = {add_products<1>, add_products<2>,
                                                       add_products<3>, add_products<4>,
                                                       add_products<5>, add_products<kRowsAtOnce>};

// The last two shares are even: 8 rows are 4 and 4.
int64_t rows_at_once(int64_t num_left) {
  if (num_left <= kRowsAtOnce) return num_left;
  return num_left < 2 * kRowsAtOnce ? ceil_div(num_left, 2) : kRowsAtOnce;
}

}  // namespace

void float32_tile(const float* weight_I16, int64_t num_inputs, const RowBlock& x, float* y_T16) {
  std::memset(y_T16, 0, sizeof(float) * static_cast<size_t>(x.num_rows * kTileOutputs));
  const auto* const x_TI = static_cast<const float*>(x.values);
  for (int64_t first = 0; first < num_inputs; first += kChunkInputs) {
    const int64_t num_chunk_inputs = std::min(kChunkInputs, num_inputs - first);
    for (int64_t row = 0, count; row < x.num_rows; row += count) {
      count = rows_at_once(x.num_rows - row);
      kAddProducts[count - 1](weight_I16 + first * kTileOutputs, num_chunk_inputs,
                              x_TI + row * num_inputs + first, num_inputs,
                              y_T16 + row * kTileOutputs);
    }
  }
}

}  // namespace firsttoken
