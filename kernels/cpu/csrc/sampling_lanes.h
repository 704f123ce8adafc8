// Lanes picked by a comparison, and rows that do not end with a whole vector.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace firsttoken {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The next eight logits, or as many as are `left`, then -inf.
inline F8 load_up_to(const float* from, int64_t left) {
  if (left >= kLanes) return load(from);
  F8 logits = broadcast(-kInfinity);
  std::memcpy(&logits, from, sizeof(float) * static_cast<size_t>(std::max<int64_t>(left, 0)));
  return logits;
}

// One bit for each lane of a comparison.
inline int bits_of(I8 mask) {
#if defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask));
#else
  int bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= (mask[lane] & 1) << lane;
  return bits;
#endif
}

#if defined(__AVX2__)
// By the bits of a mask: the lanes whose bit is set, one a byte, in order.
inline constexpr std::array<uint64_t, 256> kLanesOfBits = [] {
  std::array<uint64_t, 256> lanes{};
  for (int bits = 0; bits < 256; ++bits) {
    int place = 0;
    for (uint64_t lane = 0; lane < 8; ++lane) {
      if (bits >> lane & 1) lanes[bits] |= lane << (8 * place++);
    }
  }
  return lanes;
}();
#endif

inline int count_bits(int bits) { return __builtin_popcount(static_cast<unsigned>(bits)); }

inline int lowest_bit(int bits) { return __builtin_ctz(static_cast<unsigned>(bits)); }

inline F8 masked(F8 values, I8 mask) {
  return reinterpret_cast<F8>(reinterpret_cast<I8>(values) & mask);
}

inline int64_t sum(I8 counts) {
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += counts[lane];
  return count;
}

// Moves the lanes of `bits` to the front. What follows them is of no meaning.
template <class Vector>
Vector packed(Vector from, int bits) {
#if defined(__AVX2__)
  const auto lanes =
      _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLanesOfBits[bits])));
  return reinterpret_cast<Vector>(
      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(from), lanes));
#else
  int place = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    from[place] = from[lane];
    place += bits >> lane & 1;
  }
  return from;
#endif
}

}  // namespace firsttoken
