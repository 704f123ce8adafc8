// Where a head's numbers lie in the cache, and how they are read and written; see batch.h.
#pragma once

#include <cstdint>

#include "batch.h"
#include "simd.h"

namespace firsttoken {

// An element of the cache is a float or a half, the latter as its bits.
using Half = uint16_t;

inline F8 load_elements(const float* from) { return load(from); }
inline F8 load_elements(const Half* from) { return load_half(from); }

inline float to_float(float element) { return element; }
inline float to_float(Half element) { return half_to_float(element); }

inline void store_elements(float* to, F8 value) { store(to, value); }
inline void store_elements(Half* to, F8 value) { store_half(to, value); }

// One KV head's part of a block: its first element, in the keys as in the values.
inline int64_t first_element(const KVLayer& cache, const HeadShape& shape, int64_t block,
                             int64_t kv_head) {
  return (block * shape.num_kv_heads + kv_head) * shape.head_dim * cache.block_size;
}

}  // namespace firsttoken
