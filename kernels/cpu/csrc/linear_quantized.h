// What int8 and int4 tiles have in common: the walk over groups, rows and steps of a group.
//
//     y[row][output]  +=  scale_x * (scale * sum of q_x * q)  +  offset * sum_x      for each group
//
// The sums of integers are exact in any order; the float part is the same for any number of rows at
// a time. A format is a struct with
//
//     Block, RowValue, kHasOffsets, kHasLowParts
//     multiply<rows>(block, x, dots)  with AVX2 or AVX-512: the sums of integers of some rows
//
// A group's sum is 32 * 127 * 32767 at most: a sixteenth of what 32 bits hold. What low parts add
// comes after all groups, in the groups' order.
#pragma once

#include <cstring>
#include <type_traits>

#include "linear_tiles.h"
#include "simd.h"

// Whether a register holds a tile's 16 outputs, and multiplies bytes.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FIRSTTOKEN_AVX512 1
#endif

namespace firsttoken {

constexpr int kHalves = kTileOutputs / kLanes;
constexpr int kPrefetchBytes = 2560;  // ahead: what memory delivers in the time that it takes
constexpr int kLineBytes = 64;

// A group's share of a block of rows.
template <class RowValue>
struct GroupRows {
  const RowValue* values;  // [rows][32]
  const float* scales;
  const float* sums;
};

template <class Format>
GroupRows<typename Format::RowValue> rows_of_group(const RowBlock& x, int64_t group) {
  const int64_t first = group * x.num_rows;
  const auto* values = static_cast<const typename Format::RowValue*>(x.values);
  return {values + first * kGroupInputs, x.scales + first, x.sums + first};
}

// [begin, end) as runs of `kMost` rows, and of smaller powers of two in the end: `work` gets a run's
// first row, and their number as a constant.
template <int kMost, class Work>
inline void for_each_run_of(int64_t begin, int64_t end, const Work& work) {
  for (; begin + kMost <= end; begin += kMost) {
    work(begin, std::integral_constant<int, kMost>{});
  }
  if constexpr (kMost > 1) for_each_run_of<kMost / 2>(begin, end, work);
}

template <class Block>
inline void prefetch_after(const Block& block) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&block);
  for (size_t at = 0; at < sizeof(Block); at += kLineBytes) {
    __builtin_prefetch(bytes + kPrefetchBytes + at);
  }
}

#if defined(FIRSTTOKEN_AVX512)

constexpr int kRowsAtOnce = 8;  // 16 sums, of integers and floats, of 32 registers

// The float factors of a group's weights.
template <class Format>
struct GroupFactors {
  __m512 scales;
  __m512 offsets;

  explicit GroupFactors(const typename Format::Block& block) {
    scales = load_halves(block.scales);
    if constexpr (Format::kHasOffsets) offsets = load_halves(block.offsets);
  }

  static __m512 load_halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

// Four bytes, sixteen times.
inline __m512i repeat_bytes(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// Rows [row, row + kRows) of the block: their outputs stay in registers over all groups.
template <class Format, int kRows>
void multiply_rows(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                   int64_t row, float* y_T16) {
  __m512 y[kRows];
  for (int r = 0; r < kRows; ++r) y[r] = _mm512_setzero_ps();
  for (int64_t group = 0; group < num_groups; ++group) {
    if (row == 0) prefetch_after(blocks[group]);
    const auto rows = rows_of_group<Format>(x, group);
    __m512i dots[kRows];
    Format::template multiply<kRows>(blocks[group], rows.values + row * kGroupInputs, dots);
    const GroupFactors<Format> factors(blocks[group]);
    for (int r = 0; r < kRows; ++r) {
      const __m512 scaled = factors.scales * _mm512_cvtepi32_ps(dots[r]);
      y[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(rows.scales[row + r]), y[r]);
      if constexpr (Format::kHasOffsets) {
        y[r] = _mm512_fmadd_ps(factors.offsets, _mm512_set1_ps(rows.sums[row + r]), y[r]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y_T16 + (row + r) * kTileOutputs, y[r]);
}

template <class Format>
void multiply_all_rows(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                       float* y_T16) {
  for_each_run_of<kRowsAtOnce>(0, x.num_rows, [&](int64_t row, auto count) {
    multiply_rows<Format, count>(blocks, num_groups, x, row, y_T16);
  });
}

// The low parts of rows [first, first + kRows) of a group's list.
template <class Format, int kRows>
inline void add_low_parts(const typename Format::Block& block, const GroupFactors<Format>& factors,
                          const LowParts& low, int64_t first, float* y_T16) {
  __m512i dots[kRows];
  Format::template multiply<kRows>(block, low.values + first * kGroupInputs, dots);
  for (int r = 0; r < kRows; ++r) {
    float* const to = y_T16 + low.rows[first + r] * kTileOutputs;
    const __m512 scaled = factors.scales * _mm512_cvtepi32_ps(dots[r]);
    const __m512 scale = _mm512_set1_ps(low.scales[first + r]);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(scaled, scale, _mm512_loadu_ps(to)));
  }
}

#else

constexpr int kRowsAtOnce = 4;  // 8 sums, and what is multiplied: most of 16 registers

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

// One row: its outputs stay in registers over all groups.
template <class Format>
void multiply_row(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                  float* y_16) {
  F8 y[kHalves] = {};
  for (int64_t group = 0; group < num_groups; ++group) {
    const typename Format::Block& block = blocks[group];
    prefetch_after(block);
    const GroupFactors<Format> factors(block);
    const auto row = rows_of_group<Format>(x, group);
    I8 dots[1][kHalves];
    multiply_group<Format, 1>(block, row.values, dots);
    for (int half = 0; half < kHalves; ++half) {
      const F8 scaled = factors.scales[half] * to_float(dots[0][half]);
      y[half] = fma(scaled, broadcast(row.scales[0]), y[half]);
      if constexpr (Format::kHasOffsets) {
        y[half] = fma(factors.offsets[half], broadcast(row.sums[0]), y[half]);
      }
    }
  }
  for (int half = 0; half < kHalves; ++half) store(y_16 + half * kLanes, y[half]);
}

template <class Format>
void multiply_all_rows(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                       float* y_T16) {
  if (x.num_rows == 1) return multiply_row<Format>(blocks, num_groups, x, y_T16);
  std::memset(y_T16, 0, sizeof(float) * static_cast<size_t>(x.num_rows * kTileOutputs));
  for (int64_t group = 0; group < num_groups; ++group) {
    const typename Format::Block& block = blocks[group];
    prefetch_after(block);
    const GroupFactors<Format> factors(block);
    const auto rows = rows_of_group<Format>(x, group);
    for_each_run_of<kRowsAtOnce>(0, x.num_rows, [&](int64_t row, auto count) {
      add_group<Format, count>(block, factors, rows, row, y_T16);
    });
  }
}

#endif

template <class Format>
void add_all_low_parts(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                       float* y_T16) {
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t count = x.low.counts[group], first = group * x.num_rows;
    if (count == 0) continue;
    const GroupFactors<Format> factors(blocks[group]);
    for_each_run_of<kRowsAtOnce>(first, first + count, [&](int64_t low, auto few) {
      add_low_parts<Format, few>(blocks[group], factors, x.low, low, y_T16);
    });
  }
}

template <class Format>
void quantized_tile(const typename Format::Block* blocks, int64_t num_groups, const RowBlock& x,
                    float* y_T16) {
  multiply_all_rows<Format>(blocks, num_groups, x, y_T16);
  if constexpr (Format::kHasLowParts) add_all_low_parts<Format>(blocks, num_groups, x, y_T16);
}

}  // namespace firsttoken
