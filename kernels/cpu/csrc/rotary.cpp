#include "rotary.h"

#include <algorithm>
#include <type_traits>

#include "cache_view.h"
#include "rows.h"
#include "simd.h"

namespace firsttoken {
namespace {

// Of one head, dimensions i.. and E + i.., `count` of each: one of every pair in either vector.
struct Pairs {
  F8 low;
  F8 high;
};

Pairs rotate(const float* head_D, const float* cos_sin_D, int64_t half_dim, int64_t i, int count) {
  const F8 low = load_some(head_D + i, count);
  const F8 high = load_some(head_D + half_dim + i, count);
  const F8 cosine = load_some(cos_sin_D + i, count);
  const F8 sine = load_some(cos_sin_D + half_dim + i, count);
  return {low * cosine - high * sine, high * cosine + low * sine};
}

// `body(i, count)` for runs of up to 8 of `size`.
template <class Body>
void for_each_run(int64_t size, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, std::integral_constant<int, kLanes>());
  if (i < size) body(i, static_cast<int>(size - i));
}

template <class Element>
void write_row(float* q_ND, const float* k_KD, const float* v_KD, const float* cos_sin_D,
               int64_t slot, const HeadShape& shape, const KVLayer& cache) {
  const int64_t head_dim = shape.head_dim, half_dim = head_dim / 2, block_size = cache.block_size;
  const int64_t block = slot / block_size, offset = slot % block_size;
  for (int64_t n = 0; n < shape.num_heads; ++n) {
    float* head = q_ND + n * head_dim;
    for_each_run(half_dim, [&](int64_t i, auto count) {
      const Pairs turned = rotate(head, cos_sin_D, half_dim, i, count);
      store_some(head + i, turned.low, count);
      store_some(head + half_dim + i, turned.high, count);
    });
  }
  for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const int64_t first = first_element(cache, shape, block, kv_head);
    Element* key = static_cast<Element*>(cache.keys) + first + offset;
    Element* value = static_cast<Element*>(cache.values) + first + offset * head_dim;
    const auto write_key = [&](int64_t dim, F8 numbers, int count) {
      Element elements[kLanes];
      store_elements(elements, numbers);
      for (int lane = 0; lane < count; ++lane) key[(dim + lane) * block_size] = elements[lane];
    };
    for_each_run(half_dim, [&](int64_t i, auto count) {
      const Pairs turned = rotate(k_KD + kv_head * head_dim, cos_sin_D, half_dim, i, count);
      write_key(i, turned.low, count);
      write_key(half_dim + i, turned.high, count);
    });
    for_each_run(head_dim, [&](int64_t i, auto count) {
      Element elements[kLanes];
      store_elements(elements, load_some(v_KD + kv_head * head_dim + i, count));
      std::copy_n(elements, static_cast<int>(count), value + i);
    });
  }
}

}  // namespace

void rotary_cache_write_row(float* q_ND, const float* k_KD, const float* v_KD,
                            const float* cos_sin_D, int64_t slot, const HeadShape& shape,
                            const KVLayer& cache) {
  const auto write = cache.half ? write_row<Half> : write_row<float>;
  write(q_ND, k_KD, v_KD, cos_sin_D, slot, shape, cache);
}

}  // namespace firsttoken

extern "C" {

// Row t of q is at q + t * q_stride, and so on.
void ft_rotary_cache_write(float* q, int64_t q_stride, const float* k, int64_t k_stride,
                           const float* v, int64_t v_stride, const float* cos_sin_PD,
                           const int64_t* positions_T, const int64_t* slot_mapping_T,
                           int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                           int64_t head_dim, void* keys, void* values, int half,
                           int64_t block_size) {
  using namespace firsttoken;
  const HeadShape shape{num_heads, num_kv_heads, head_dim};
  const KVLayer cache{keys, values, half != 0, block_size};
  PoolLease pool;
  for_each_row(*pool, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, [&](int64_t t) {
    rotary_cache_write_row(q + t * q_stride, k + t * k_stride, v + t * v_stride,
                           cos_sin_PD + positions_T[t] * head_dim, slot_mapping_T[t], shape, cache);
  });
}
}
