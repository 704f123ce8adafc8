// The products of one tile of 16 outputs with a block of rows, one function a format. Each row's
// sums run over the inputs (or their groups) in ascending order, whatever the number of rows.
#pragma once

#include "linear.h"
#include "linear_layout.h"

namespace firsttoken {

constexpr int kMaxBlockRows = 128;

// What a row's numbers are in the block that a quantized tile's products read: as wide as their
// operands, which costs nothing, and 256 times as fine as a byte would be.
using RowValue = int16_t;
constexpr int kLargestRowValue = 32767;

void float32_tile(const float* weight_I16, int64_t num_inputs, const RowBlock& x, float* y_T16);
void int8_tile(const Int8Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16);
void int4_tile(const Int4Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16);

}  // namespace firsttoken
