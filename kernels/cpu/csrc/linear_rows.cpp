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

struct GroupScale {
  float scale;
  float sum;
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

float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The largest magnitude. As an integer, because there a NaN is larger than all else.
int32_t amax_bits(const Group& group) {
  I8 largest{};
  for (const F8& values : group.values) {
    const F8 magnitudes = abs(values);
    I8 bits;
    std::memcpy(&bits, &magnitudes, sizeof bits);
    largest = bits > largest ? bits : largest;
  }
  int32_t result = largest[0];
  for (int lane = 1; lane < kLanes; ++lane) result = std::max(result, largest[lane]);
  return result;
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

// A group that holds what is not finite makes all products with its row NaN, and no other row's.
template <class RowValue>
GroupScale quantize(const Group& group, RowValue* values) {
  constexpr float kLargest = kLargestRowValue<RowValue>;
  const int32_t bits = amax_bits(group);
  const float amax = as_float(bits);
  const bool finite = bits < kInfinityBits;
  if (!finite || amax < kSmallestAmax) {
    std::memset(values, 0, kGroupInputs * sizeof(RowValue));
    const float nothing = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    return {nothing, nothing};
  }
  const float to_quants = kLargest / amax;
  I8 quants[kVectors];
  I8 sums{};
  for (int v = 0; v < kVectors; ++v) {
    quants[v] = round_to_int(group.values[v] * to_quants);
    sums += quants[v];
  }
  store_quants(quants, values);
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float scale = amax / kLargest;
  return {scale, scale * static_cast<float>(sum)};
}

// As `quantize`, in two halves: each number is 256 * high + low.
GroupScale quantize_wide(const Group& group, float amax, int8_t* high, int8_t* low) {
  const float to_quants = kLargestWide / amax;
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
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float scale = amax / kLargestWide;
  return {scale, scale * static_cast<float>(sum)};
}

// Never for what is not finite, or so small that its scale would not be.
bool is_wide(float amax, float wide_amax) {
  return amax > wide_amax && amax >= kSmallestAmax && amax <= std::numeric_limits<float>::max();
}

float root_mean_square(const float* x_I, int64_t num_inputs) {
  F8 squares = broadcast(0.0f);
  for (int64_t i = 0; i < num_inputs; i += kLanes) {
    const F8 x = load_some(x_I + i, static_cast<int>(std::min<int64_t>(kLanes, num_inputs - i)));
    squares = fma(x, x, squares);
  }
  return std::sqrt(sum(squares) / static_cast<float>(num_inputs));
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
  if (format_ == Format::kFloat32) {
    std::memcpy(values_ + row * row_bytes_, x_I, static_cast<size_t>(row_bytes_));
    return;
  }
  const int64_t block = row / rows_per_block_, first = first_row(block);
  const int64_t height = std::min(rows_per_block_, num_rows_ - first);
  const bool may_be_wide = format_ == Format::kInt4;
  const float wide_amax = may_be_wide ? kWideAmax * root_mean_square(x_I, num_inputs_) : 0.0f;
  for (int64_t group = 0; group < num_groups_; ++group) {
    const int64_t input = group * kGroupInputs;
    const int64_t begin = first * num_groups_ + group * height, at = begin + (row - first);
    const Group numbers = load_group(x_I + input, num_inputs_ - input);
    GroupScale found;
    if (!may_be_wide) {
      found = quantize(numbers, reinterpret_cast<Int8RowValue*>(values_) + at * kGroupInputs);
    } else if (const float amax = as_float(amax_bits(numbers)); is_wide(amax, wide_amax)) {
      // Rows are set by several threads: they come into the list in any order.
      int32_t* const count = low_counts_ + block * num_groups_ + group;
      const int64_t low = begin + __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
      found = quantize_wide(numbers, amax,
                            reinterpret_cast<Int4RowValue*>(values_) + at * kGroupInputs,
                            low_values_ + low * kGroupInputs);
      low_rows_[low] = static_cast<int32_t>(row - first);
      low_scales_[low] = found.scale;
      found.scale *= 256.0f;
    } else {
      found = quantize(numbers, reinterpret_cast<Int4RowValue*>(values_) + at * kGroupInputs);
    }
    scales_[at] = found.scale;
    sums_[at] = found.sum;
  }
}

}  // namespace firsttoken
