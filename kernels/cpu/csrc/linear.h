// Products of rows with a packed matrix.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "threads.h"

namespace firsttoken {

enum class Format : int32_t { kFloat32 = 0, kInt8 = 1, kInt4 = 2 };

// A matrix [O, I] packed by `pack_matrix` into memory that the caller owns, 64-byte aligned.
struct PackedMatrix {
  Format format;
  int64_t num_outputs;
  int64_t num_inputs;
  const uint8_t* data;
};

int64_t packed_bytes(Format format, int64_t num_outputs, int64_t num_inputs);

void pack_matrix(ThreadPool& pool, Format format, const float* weight_OI, int64_t num_outputs,
                 int64_t num_inputs, uint8_t* packed);

// Row `output` of the matrix as the products see it, [I].
void unpack_row(const PackedMatrix& matrix, int64_t output, float* row_I);

// What is to be added to a few of a group's rows, whose own values are the high bytes of 16 bits.
struct LowParts {
  const int32_t* counts;  // [groups]: how many rows
  const int32_t* rows;    // [groups, rows]: which ones, in any order
  const int8_t* values;   // [groups, rows, 32]
  const float* scales;    // [groups, rows]
};

// Some rows of PreparedRows. Numbers that are multiplied one after the other lie so.
struct RowBlock {
  int64_t num_rows;
  const void* values;   // kFloat32: float [rows, I]; kInt8: int16, kInt4: int8 [groups, rows, 32]
  const float* scales;  // [groups, rows]
  const float* sums;    // [groups, rows]: the sum of what the group's values stand for
  LowParts low;         // kInt4
};

// Rows in the form that a format's products read. Keeps its memory from call to call.
class PreparedRows {
 public:
  void resize(Format format, int64_t num_rows, int64_t num_inputs);

  // Rows may be set by several threads at once.
  void set_row(int64_t row, const float* x_I);

  int64_t num_blocks() const { return (num_rows_ + rows_per_block_ - 1) / rows_per_block_; }
  int64_t first_row(int64_t block) const { return block * rows_per_block_; }
  RowBlock block(int64_t block) const;

 private:
  template <class RowValue>
  void quantize_row(int64_t row, const float* x_I, float wide_amax);
  int64_t take_low_part(int64_t block, int64_t group, int64_t row_in_block, float scale);

  Format format_ = Format::kFloat32;
  int64_t num_rows_ = 0;
  int64_t num_inputs_ = 0;
  int64_t num_groups_ = 0;
  int64_t rows_per_block_ = 1;
  int64_t row_bytes_ = 0;  // of a row's values
  int64_t capacity_bytes_ = 0;
  std::unique_ptr<uint8_t, decltype(&std::free)> memory_{nullptr, &std::free};
  uint8_t* values_ = nullptr;
  float* scales_ = nullptr;
  float* sums_ = nullptr;
  int32_t* low_counts_ = nullptr;
  int32_t* low_rows_ = nullptr;
  float* low_scales_ = nullptr;
  int8_t* low_values_ = nullptr;
};

// y = x . W^T + bias, or y + that when `add` is set. `bias_O` may be null. Row t of y is at
// y + t * y_stride.
void linear(ThreadPool& pool, const PackedMatrix& matrix, const PreparedRows& x,
            const float* bias_O, float* y, int64_t y_stride, bool add);

// y = silu(gate) * up, where gate is the first half of x . W^T + bias and up the second: what
// `linear` and `silu_mul_row` compute, but neither half is ever written. The halves must be whole
// tiles.
bool halves_are_whole_tiles(const PackedMatrix& matrix);
void linear_silu_mul(ThreadPool& pool, const PackedMatrix& matrix, const PreparedRows& x,
                     const float* bias_O, float* y, int64_t y_stride);

}  // namespace firsttoken
