#include "activation.h"

#include "rows.h"

namespace firsttoken {

void silu_mul_row(const float* gate_up_G, int64_t inner_size, float* out_F) {
  const float* gate = gate_up_G;
  const float* up = gate_up_G + inner_size;
  int64_t i = 0;
  for (; i + kLanes <= inner_size; i += kLanes) {
    store(out_F + i, silu_mul(load(gate + i), load(up + i)));
  }
  if (i < inner_size) {
    const int rest = static_cast<int>(inner_size - i);
    store_some(out_F + i, silu_mul(load_some(gate + i, rest), load_some(up + i, rest)), rest);
  }
}

}  // namespace firsttoken

extern "C" {

void ft_silu_mul(const float* gate_up_TG, int64_t num_rows, int64_t inner_size, float* out_TF) {
  using namespace firsttoken;
  PoolLease pool;
  for_each_row(*pool, num_rows, inner_size, [&](int64_t row) {
    silu_mul_row(gate_up_TG + row * 2 * inner_size, inner_size, out_TF + row * inner_size);
  });
}
}
