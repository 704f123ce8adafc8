// Rows of activations, quantized for themselves: a scale for each 32 inputs of each row.
//
// Rows are kept in blocks of some tens, so that those of a block stay in the L2 cache while all
// tiles of a matrix are multiplied with them:
//
//     kInt8, kInt4    | block: group 0: rows 0, 1, ... | group 1: rows 0, 1, ... | ... | block ...
//     kFloat32        | block: row 0: all inputs | row 1 | ...                         | block ...
//
// Beside int4 a number has 8 bits. That is coarse where one number is far larger than its row's
// others, as some always are: it takes the scale with it. Such groups, a tenth of all, are wide:
// they have 16 bits, the low half of which is multiplied apart (LowParts). A group is wide for what
// its own row holds.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "linear.h"
#include "linear_layout.h"
#include "linear_tiles.h"
#include "simd.h"

namespace firsttoken {
namespace {

constexpr int kVectors = kGroupInputs / kLanes;
constexpr int64_t kBlockBytes = 256 * 1024;  // half of an L2 cache
constexpr int64_t kMinBlockRows = 24;        // for fewer, unpacking weights would begin to cost
constexpr int32_t kInfinityBits = 0x7F800000;
constexpr float kWideAmax = 6.0f;           // in root mean squares of the row
constexpr int kLargestWide = 127 * 256 + 127;  // its high half is 127 at most, its low half 127
constexpr float kSmallestAmax = 1e-30f;  // a group of smaller numbers is zero: its scale is finite

struct Group {
  F8 values[kVectors];
};

Group load_group(const float* x, int64_t count) {
  Group group;
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = count - v * kLanes;
    group.values[v] = left >= kLanes ? load(x + v * kLanes)
                      : left > 0     ? load_some(x + v * kLanes, static_cast<int>(left))
                                     : broadcast(0.0f);
  }
  return group;
}

F8 as_floats(I8 bits) {
  F8 values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

// All lanes of vector i, combined, in lane i. The order is a tree's: for what is exact in any order.
template <class Combine>
I8 combine_lanes(const I8 (&vectors)[kLanes], Combine combine) {
  I8 pairs[4], fours[2];
  for (int i = 0; i < 4; ++i) {
    const I8 a = vectors[2 * i], b = vectors[2 * i + 1];
    pairs[i] = combine(__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14),
                       __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15));
  }
  for (int i = 0; i < 2; ++i) {
    const I8 a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = combine(__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13),
                       __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
  }
  return combine(__builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11),
                 __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15));
}

I8 larger(I8 a, I8 b) { return a > b ? a : b; }

// The largest magnitude of each lane. As integers, because there a NaN is larger than all else.
I8 magnitude_bits(const Group& group) {
  I8 largest{};
  for (const F8& values : group.values) {
    const F8 magnitudes = abs(values);
    I8 bits;
    std::memcpy(&bits, &magnitudes, sizeof bits);
    largest = larger(bits, largest);
  }
  return largest;
}

void store_quants(const I8 (&quants)[kVectors], int16_t* to) {
#if defined(__AVX2__)
  for (int v = 0; v < kVectors; v += 2) {
    const __m256i words = _mm256_packs_epi32(reinterpret_cast<__m256i>(quants[v]),
                                             reinterpret_cast<__m256i>(quants[v + 1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + v * kLanes),
                        _mm256_permute4x64_epi64(words, 0xD8));
  }
#else
  for (int i = 0; i < kGroupInputs; ++i) {
    to[i] = static_cast<int16_t>(quants[i / kLanes][i % kLanes]);
  }
#endif
}

void store_quants(const I8 (&quants)[kVectors], int8_t* to) {
  int16_t words[kGroupInputs];
  store_quants(quants, words);
#if defined(__AVX2__)
  const auto* from = reinterpret_cast<const __m256i*>(words);
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(bytes, 0xD8));
#else
  for (int i = 0; i < kGroupInputs; ++i) to[i] = static_cast<int8_t>(words[i]);
#endif
}

// Returns the sums of the lanes.
template <class RowValue>
I8 quantize(const Group& group, float to_quants, RowValue* values) {
  I8 quants[kVectors];
  I8 sums{};
  for (int v = 0; v < kVectors; ++v) {
    quants[v] = round_to_int(group.values[v] * to_quants);
    sums += quants[v];
  }
  store_quants(quants, values);
  return sums;
}

// In two halves: each number is 256 * high + low.
I8 quantize_wide(const Group& group, float to_quants, int8_t* high, int8_t* low) {
  I8 highs[kVectors], lows[kVectors];
  I8 sums{};
  for (int v = 0; v < kVectors; ++v) {
    const I8 quants = round_to_int(group.values[v] * to_quants);
    highs[v] = (quants + 128) >> 8;
    lows[v] = quants - (highs[v] << 8);
    sums += quants;
  }
  store_quants(highs, high);
  store_quants(lows, low);
  return sums;
}

float root_mean_square(const float* x_I, int64_t num_inputs) {
  F8 squares[kVectors] = {};  // a chain of sums each, so that none waits for another
  for (int64_t input = 0; input < num_inputs; input += kGroupInputs) {
    const Group group = load_group(x_I + input, num_inputs - input);
    for (int v = 0; v < kVectors; ++v) {
      squares[v] = fma(group.values[v], group.values[v], squares[v]);
    }
  }
  const F8 all = (squares[0] + squares[2]) + (squares[1] + squares[3]);
  return std::sqrt(sum(all) / static_cast<float>(num_inputs));
}

int64_t row_bytes(Format format, int64_t num_inputs) {
  if (format == Format::kFloat32) return num_inputs * static_cast<int64_t>(sizeof(float));
  const int64_t padded = ceil_div(num_inputs, kGroupInputs) * kGroupInputs;
  const size_t value_bytes = format == Format::kInt8 ? sizeof(Int8RowValue) : sizeof(Int4RowValue);
  return padded * static_cast<int64_t>(value_bytes);
}

}  // namespace

void PreparedRows::resize(Format format, int64_t num_rows, int64_t num_inputs) {
  format_ = format;
  num_rows_ = num_rows;
  num_inputs_ = num_inputs;
  num_groups_ = ceil_div(num_inputs, kGroupInputs);
  row_bytes_ = row_bytes(format, num_inputs);

  const int64_t most_rows =
      std::clamp<int64_t>(kBlockBytes / row_bytes_, kMinBlockRows, kMaxBlockRows);
  const int64_t num_blocks = std::max<int64_t>(1, ceil_div(num_rows, most_rows));
  rows_per_block_ = std::max<int64_t>(1, ceil_div(num_rows, num_blocks));

  const int64_t num_values = num_rows * num_groups_;
  const int64_t num_low = format == Format::kInt4 ? num_values : 0;
  const int64_t num_counts = format == Format::kInt4 ? num_blocks * num_groups_ : 0;
  int64_t bytes = 0;
  const auto place = [&bytes](int64_t size) {
    const int64_t at = bytes;
    bytes += ceil_div(size, 64) * 64;
    return at;
  };
  const int64_t values = place(num_rows * row_bytes_);
  const int64_t scales = place(num_values * 4), sums = place(num_values * 4);
  const int64_t low_values = place(num_low * kGroupInputs), low_scales = place(num_low * 4);
  const int64_t low_rows = place(num_low * 4), low_counts = place(num_counts * 4);
  if (bytes > capacity_bytes_) {
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    capacity_bytes_ = bytes;
  }
  uint8_t* const memory = memory_.get();
  values_ = memory + values;
  scales_ = reinterpret_cast<float*>(memory + scales);
  sums_ = reinterpret_cast<float*>(memory + sums);
  low_values_ = reinterpret_cast<int8_t*>(memory + low_values);
  low_scales_ = reinterpret_cast<float*>(memory + low_scales);
  low_rows_ = reinterpret_cast<int32_t*>(memory + low_rows);
  low_counts_ = reinterpret_cast<int32_t*>(memory + low_counts);
  std::fill_n(low_counts_, num_counts, 0);
}

RowBlock PreparedRows::block(int64_t block) const {
  const int64_t first = first_row(block), at = first * num_groups_;
  const LowParts low{low_counts_ + block * num_groups_, low_rows_ + at,
                     low_values_ + at * kGroupInputs, low_scales_ + at};
  return {std::min(rows_per_block_, num_rows_ - first), values_ + first * row_bytes_,
          scales_ + at, sums_ + at, low};
}

void PreparedRows::set_row(int64_t row, const float* x_I) {
  switch (format_) {
    case Format::kFloat32:
      std::memcpy(values_ + row * row_bytes_, x_I, static_cast<size_t>(row_bytes_));
      return;
    case Format::kInt8:
      quantize_row<Int8RowValue>(row, x_I, std::numeric_limits<float>::infinity());
      return;
    case Format::kInt4:
      quantize_row<Int4RowValue>(row, x_I, kWideAmax * root_mean_square(x_I, num_inputs_));
      return;
  }
}

// Groups of numbers larger than `wide_amax` are wide. Eight groups at a time have their largest
// numbers and their sums taken across lanes. A group of nothing but zeros, or nearly, is zero; one
// that holds what is not finite makes all products with its row NaN, and no other row's.
template <class RowValue>
void PreparedRows::quantize_row(int64_t row, const float* x_I, float wide_amax) {
  constexpr float kLargest = kLargestRowValue<RowValue>;
  const int64_t block = row / rows_per_block_, first = first_row(block);
  const int64_t height = std::min(rows_per_block_, num_rows_ - first);
  auto* const values = reinterpret_cast<RowValue*>(values_);
  for (int64_t first_group = 0; first_group < num_groups_; first_group += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, num_groups_ - first_group));
    const float* const x = x_I + first_group * kGroupInputs;
    const int64_t num_left = num_inputs_ - first_group * kGroupInputs;
    const int64_t at = first * num_groups_ + first_group * height + (row - first);
    const auto group_of = [&](int i) {
      return load_group(x + i * kGroupInputs, num_left - i * kGroupInputs);
    };

    I8 largest[kLanes] = {};
    for (int i = 0; i < count; ++i) largest[i] = magnitude_bits(group_of(i));
    const I8 amax_bits = combine_lanes(largest, larger);
    const F8 amax = as_floats(amax_bits);
    const I8 is_zero = amax < broadcast(kSmallestAmax);
    const I8 is_finite = amax_bits < I8{} + kInfinityBits;
    const I8 is_wide = (amax > broadcast(wide_amax)) & is_finite & ~is_zero;
    const F8 largest_quant = is_wide ? broadcast(kLargestWide) : broadcast(kLargest);
    const F8 to_quants = is_finite & ~is_zero ? largest_quant / amax : broadcast(0.0f);
    const F8 not_finite = broadcast(std::numeric_limits<float>::quiet_NaN());
    const F8 scales = is_finite ? (is_zero ? broadcast(0.0f) : amax / largest_quant) : not_finite;

    I8 sums[kLanes] = {};
    for (int i = 0; i < count; ++i) {
      RowValue* const to = values + (at + i * height) * kGroupInputs;
      if (!is_finite[i]) {
        std::memset(to, 0, kGroupInputs * sizeof(RowValue));
      } else if (!is_wide[i]) {
        sums[i] = quantize(group_of(i), to_quants[i], to);
      } else if constexpr (std::is_same_v<RowValue, Int4RowValue>) {
        const int64_t low = take_low_part(block, first_group + i, row - first, scales[i]);
        sums[i] = quantize_wide(group_of(i), to_quants[i], to, low_values_ + low * kGroupInputs);
      }
    }
    const I8 added = combine_lanes(sums, [](I8 a, I8 b) { return a + b; });
    const F8 sums_of_values = scales * to_float(added);
    for (int i = 0; i < count; ++i) {
      scales_[at + i * height] = is_wide[i] ? scales[i] * 256.0f : scales[i];
      sums_[at + i * height] = sums_of_values[i];
    }
  }
}

// A place in a group's list; several threads set rows, which come into it in any order.
int64_t PreparedRows::take_low_part(int64_t block, int64_t group, int64_t row_in_block,
                                    float scale) {
  const int64_t first = first_row(block);
  const int64_t height = std::min(rows_per_block_, num_rows_ - first);
  int32_t* const count = low_counts_ + block * num_groups_ + group;
  const int64_t low = first * num_groups_ + group * height +
                      __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
  low_rows_[low] = static_cast<int32_t>(row_in_block);
  low_scales_[low] = scale;
  return low;
}

}  // namespace firsttoken
