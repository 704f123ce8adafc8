// Rows of activations, quantized for themselves: a scale for each 32 inputs of each row.
//
// Rows are kept in blocks of some tens, so that those of a block stay in the L2 cache while all
// tiles of a matrix are multiplied with them:
//
//     kInt8, kInt4    | block: group 0: rows 0, 1, ... | group 1: rows 0, 1, ... | ... | block ...
//     kFloat32        | block: row 0: all inputs | row 1 | ...                         | block ...
#include <algorithm>
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
  float amax;
  std::memcpy(&amax, &bits, sizeof amax);
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

  const int64_t value_bytes = ceil_div(num_rows * row_bytes_, 64) * 64;
  const int64_t scales_bytes = num_rows * num_groups_ * static_cast<int64_t>(sizeof(float));
  const int64_t bytes = value_bytes + ceil_div(2 * scales_bytes, 64) * 64;
  if (bytes > capacity_bytes_) {
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    capacity_bytes_ = bytes;
  }
  values_ = memory_.get();
  scales_ = reinterpret_cast<float*>(values_ + value_bytes);
  sums_ = scales_ + num_rows * num_groups_;
}

RowBlock PreparedRows::block(int64_t block) const {
  const int64_t first = first_row(block);
  return {std::min(rows_per_block_, num_rows_ - first), values_ + first * row_bytes_,
          scales_ + first * num_groups_, sums_ + first * num_groups_};
}

void PreparedRows::set_row(int64_t row, const float* x_I) {
  if (format_ == Format::kFloat32) {
    std::memcpy(values_ + row * row_bytes_, x_I, static_cast<size_t>(row_bytes_));
    return;
  }
  const int64_t first = row / rows_per_block_ * rows_per_block_;
  const int64_t height = std::min(rows_per_block_, num_rows_ - first);
  for (int64_t group = 0; group < num_groups_; ++group) {
    const int64_t input = group * kGroupInputs;
    const int64_t at = first * num_groups_ + group * height + (row - first);
    const Group numbers = load_group(x_I + input, num_inputs_ - input);
    const GroupScale found =
        format_ == Format::kInt8
            ? quantize(numbers, reinterpret_cast<Int8RowValue*>(values_) + at * kGroupInputs)
            : quantize(numbers, reinterpret_cast<Int4RowValue*>(values_) + at * kGroupInputs);
    scales_[at] = found.scale;
    sums_[at] = found.sum;
  }
}

}  // namespace firsttoken
