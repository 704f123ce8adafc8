// The products of one tile of 16 outputs with a block of rows, one function a format. Each row's
// sums run over the inputs (or their groups) in ascending order, whatever the number of rows.
#pragma once

#include "linear.h"
#include "linear_layout.h"

namespace firsttoken {

constexpr int kMaxBlockRows = 128;

// What a row's numbers are in the block that a quantized tile's products read.
//
// With int8 they are as wide as the products' operands: bytes would cost the same, as two products
// of signed bytes fill a lane of 16, signs would have to be moved from one operand to the other,
// and the sums widened. Four bits leave room: with bytes, a group's sums fit into lanes of 16.
using Int8RowValue = int16_t;
using Int4RowValue = int8_t;

template <class RowValue>
constexpr int kLargestRowValue = (1 << (8 * sizeof(RowValue) - 1)) - 1;

void float32_tile(const float* weight_I16, int64_t num_inputs, const RowBlock& x, float* y_T16);
void int8_tile(const Int8Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16);
void int4_tile(const Int4Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16);

}  // namespace firsttoken
