// What int8 and int4 tiles have in common: the walk over groups, rows and steps of a group.
//
//     y[row][output]  +=  scale_x * (scale * sum of q_x * q)  +  offset * sum_x      for each group
//
// The sums of integers are exact in any order; the float part is the same for any number of rows at
// a time. A format is a struct with
//
//     Block, RowValue, kHasOffsets, kHasLowParts
//     multiply<rows>(block, x, dots)  with AVX2: the sums of integers of some rows
//
// A group's sum is 32 * 127 * 32767 at most: a sixteenth of what 32 bits hold.
#pragma once

#include <cstring>

#include "linear_tiles.h"
#include "simd.h"

namespace firsttoken {

constexpr int kHalves = kTileOutputs / kLanes;
constexpr int kRowsAtOnce = 4;        // 8 sums, and what is multiplied: most of 16 registers
constexpr int kPrefetchBytes = 2560;  // ahead: what memory delivers in the time that it takes
constexpr int kLineBytes = 64;

#if defined(__AVX2__)

inline __m256i load_bytes(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Four bytes, eight times.
inline __m256i repeat_bytes(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm256_set1_epi32(bytes);
}

// Keeps two values in registers, in this order of events. Without it the compiler takes the
// products of all steps before it adds up the first, and has nowhere to put them.
inline void settle(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }

template <class Format, int kRows>
inline void multiply_group(const typename Format::Block& block, const typename Format::RowValue* x,
                           I8 (&dots)[kRows][kHalves]) {
  Format::template multiply<kRows>(block, x, dots);
}

#else

template <class Format, int kRows>
inline void multiply_group(const typename Format::Block& block, const typename Format::RowValue* x,
                           I8 (&dots)[kRows][kHalves]) {
  int32_t sums[kRows][kTileOutputs] = {};
  for (int input = 0; input < kGroupInputs; ++input) {
    int32_t quants[kTileOutputs];
    for (int output = 0; output < kTileOutputs; ++output) {
      quants[output] = quant_at(block, input, output);
    }
    for (int r = 0; r < kRows; ++r) {
      const int32_t value = x[r * kGroupInputs + input];
      for (int output = 0; output < kTileOutputs; ++output) {
        sums[r][output] += value * quants[output];
      }
    }
  }
  std::memcpy(dots, sums, sizeof sums);
}

#endif

// A group's share of a block of rows.
template <class RowValue>
struct GroupRows {
  const RowValue* values;  // [rows][32]
  const float* scales;
  const float* sums;
};

// The float factors of a group's weights.
template <class Format>
struct GroupFactors {
  F8 scales[kHalves];
  F8 offsets[kHalves];

  explicit GroupFactors(const typename Format::Block& block) {
    for (int half = 0; half < kHalves; ++half) {
      scales[half] = load_half(block.scales + half * kLanes);
      if constexpr (Format::kHasOffsets) offsets[half] = load_half(block.offsets + half * kLanes);
    }
  }
};

template <class Format, int kRows>
inline void add_group(const typename Format::Block& block, const GroupFactors<Format>& factors,
                      const GroupRows<typename Format::RowValue>& x, int64_t row, float* y_T16) {
  I8 dots[kRows][kHalves];
  multiply_group<Format, kRows>(block, x.values + row * kGroupInputs, dots);
  for (int half = 0; half < kHalves; ++half) {
    for (int r = 0; r < kRows; ++r) {
      float* const to = y_T16 + (row + r) * kTileOutputs + half * kLanes;
      const F8 scaled = factors.scales[half] * to_float(dots[r][half]);
      F8 y = fma(scaled, broadcast(x.scales[row + r]), load(to));
      if constexpr (Format::kHasOffsets) {
        y = fma(factors.offsets[half], broadcast(x.sums[row + r]), y);
      }
      store(to, y);
    }
  }
}

// The low parts of rows [first, first + kRows) of a group's list.
template <class Format, int kRows>
inline void add_low_parts(const typename Format::Block& block, const GroupFactors<Format>& factors,
                          const LowParts& low, int64_t first, float* y_T16) {
  I8 dots[kRows][kHalves];
  multiply_group<Format, kRows>(block, low.values + first * kGroupInputs, dots);
  for (int r = 0; r < kRows; ++r) {
    const F8 scale = broadcast(low.scales[first + r]);
    for (int half = 0; half < kHalves; ++half) {
      float* const to = y_T16 + low.rows[first + r] * kTileOutputs + half * kLanes;
      store(to, fma(factors.scales[half] * to_float(dots[r][half]), scale, load(to)));
    }
  }
}

template <class Format>
void quantized_tile(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                    float* y_T16) {
  using RowValue = typename Format::RowValue;
  std::memset(y_T16, 0, sizeof(float) * static_cast<size_t>(x.num_rows * kTileOutputs));
  for (int64_t group = 0; group < num_groups; ++group) {
    const typename Format::Block& block = blocks[group];
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&block);
    for (size_t at = 0; at < sizeof(typename Format::Block); at += kLineBytes) {
      __builtin_prefetch(bytes + kPrefetchBytes + at);
    }
    const GroupFactors<Format> factors(block);
    const int64_t first = group * x.num_rows;
    const GroupRows<RowValue> rows{static_cast<const RowValue*>(x.values) + first * kGroupInputs,
                         x.scales + first, x.sums + first};
    int64_t row = 0;
    for (; row + kRowsAtOnce <= x.num_rows; row += kRowsAtOnce) {
      add_group<Format, kRowsAtOnce>(block, factors, rows, row, y_T16);
    }
    switch (x.num_rows - row) {
      case 3:
        add_group<Format, 3>(block, factors, rows, row, y_T16);
        break;
      case 2:
        add_group<Format, 2>(block, factors, rows, row, y_T16);
        break;
      case 1:
        add_group<Format, 1>(block, factors, rows, row, y_T16);
        break;
    }
    if constexpr (Format::kHasLowParts) {
      int64_t low = first;
      const int64_t end = first + x.low.counts[group];
      for (; low + kRowsAtOnce <= end; low += kRowsAtOnce) {
        add_low_parts<Format, kRowsAtOnce>(block, factors, x.low, low, y_T16);
      }
      for (; low < end; ++low) add_low_parts<Format, 1>(block, factors, x.low, low, y_T16);
    }
  }
}

}  // namespace firsttoken
