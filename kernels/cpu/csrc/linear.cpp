#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "linear_layout.h"
#include "linear_tiles.h"
#include "rows.h"
#include "simd.h"

namespace firsttoken {
namespace {

constexpr std::integral_constant<int, kLanes> kAllLanes;

// The rows of a tile's outputs lie pages apart: nobody else fetches them before they are written.
constexpr int64_t kRowsAhead = 12;

void fetch_to_write(const float* line) { __builtin_prefetch(line, 1); }

void multiply_tile(const PackedMatrix& matrix, int64_t tile, const RowBlock& x, float* y_T16) {
  const int64_t num_groups = ceil_div(matrix.num_inputs, kGroupInputs);
  switch (matrix.format) {
    case Format::kFloat32:
      float32_tile(reinterpret_cast<const float*>(matrix.data) +
                       tile * matrix.num_inputs * kTileOutputs,
                   matrix.num_inputs, x, y_T16);
      return;
    case Format::kInt8:
      int8_tile(reinterpret_cast<const Int8Block*>(matrix.data) + tile * num_groups, num_groups, x,
                y_T16);
      return;
    case Format::kInt4:
      int4_tile(reinterpret_cast<const Int4Block*>(matrix.data) + tile * num_groups, num_groups, x,
                y_T16);
      return;
  }
}

// Eight outputs of a row, or the last `count` of them; a constant where there are eight.
template <class Count>
void store_outputs(F8 value, const float* bias, float* y, Count count, bool add) {
  if (bias != nullptr) value += load_some(bias, count);
  if (add) value += load_some(y, count);
  store_some(y, value, count);
}

}  // namespace

void linear(ThreadPool& pool, const PackedMatrix& matrix, const PreparedRows& x,
            const float* bias_O, float* y, int64_t y_stride, bool add) {
  const int64_t num_tiles = ceil_div(matrix.num_outputs, kTileOutputs);
  pool.for_each(x.num_blocks() * num_tiles, [&](int64_t item, int) {
    const int64_t block = item / num_tiles, tile = item % num_tiles;
    const RowBlock rows = x.block(block);
    alignas(64) float y_T16[kMaxBlockRows * kTileOutputs];
    multiply_tile(matrix, tile, rows, y_T16);

    const int64_t first = tile * kTileOutputs;
    const int count = static_cast<int>(std::min<int64_t>(kTileOutputs, matrix.num_outputs - first));
    const float* bias = bias_O == nullptr ? nullptr : bias_O + first;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      float* to = y + (x.first_row(block) + row) * y_stride + first;
      const float* from = y_T16 + row * kTileOutputs;
      if (row + kRowsAhead < rows.num_rows) fetch_to_write(to + kRowsAhead * y_stride);
      for (int at = 0; at < count; at += kLanes) {
        const float* const bias_8 = bias == nullptr ? nullptr : bias + at;
        if (at + kLanes <= count) {
          store_outputs(load(from + at), bias_8, to + at, kAllLanes, add);
        } else {
          store_outputs(load(from + at), bias_8, to + at, count - at, add);
        }
      }
    }
  });
}

bool halves_are_whole_tiles(const PackedMatrix& matrix) {
  return matrix.num_outputs % (2 * kTileOutputs) == 0;
}

void linear_silu_mul(ThreadPool& pool, const PackedMatrix& matrix, const PreparedRows& x,
                     const float* bias_O, float* y, int64_t y_stride) {
  const int64_t half = matrix.num_outputs / 2, num_tiles = half / kTileOutputs;
  pool.for_each(x.num_blocks() * num_tiles, [&](int64_t item, int) {
    const int64_t block = item / num_tiles, tile = item % num_tiles;
    const RowBlock rows = x.block(block);
    alignas(64) float gate_T16[kMaxBlockRows * kTileOutputs];
    alignas(64) float up_T16[kMaxBlockRows * kTileOutputs];
    multiply_tile(matrix, tile, rows, gate_T16);
    multiply_tile(matrix, tile + num_tiles, rows, up_T16);

    const int64_t first = tile * kTileOutputs;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      float* to = y + (x.first_row(block) + row) * y_stride + first;
      if (row + kRowsAhead < rows.num_rows) fetch_to_write(to + kRowsAhead * y_stride);
      for (int at = 0; at < kTileOutputs; at += kLanes) {
        F8 gate = load(gate_T16 + row * kTileOutputs + at);
        F8 up = load(up_T16 + row * kTileOutputs + at);
        if (bias_O != nullptr) {
          gate += load(bias_O + first + at);
          up += load(bias_O + half + first + at);
        }
        store(to + at, silu_mul(gate, up));
      }
    }
  });
}

}  // namespace firsttoken

extern "C" {

int64_t ft_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
  using namespace firsttoken;
  return packed_bytes(static_cast<Format>(format), num_outputs, num_inputs);
}

void ft_pack_matrix(int32_t format, const float* weight_OI, int64_t num_outputs,
                    int64_t num_inputs, uint8_t* packed) {
  using namespace firsttoken;
  PoolLease pool;
  pack_matrix(*pool, static_cast<Format>(format), weight_OI, num_outputs, num_inputs, packed);
}

// Row t of x is at x + t * x_stride.
void ft_linear(int32_t format, int64_t num_outputs, int64_t num_inputs, const uint8_t* data,
               const float* x, int64_t x_stride, int64_t num_rows, const float* bias_O, float* y,
               int64_t y_stride) {
  using namespace firsttoken;
  static PreparedRows* const rows = new PreparedRows;  // used by whoever holds the pool
  PoolLease pool;
  rows->resize(static_cast<Format>(format), num_rows, num_inputs);
  for_each_row(*pool, num_rows, num_inputs,
               [&](int64_t row) { rows->set_row(row, x + row * x_stride); });
  linear(*pool, {static_cast<Format>(format), num_outputs, num_inputs, data}, *rows, bias_O, y,
         y_stride, false);
}

void ft_unpack_rows(int32_t format, int64_t num_outputs, int64_t num_inputs, const uint8_t* data,
                    const int64_t* outputs_R, int64_t num_rows, float* rows_RI) {
  using namespace firsttoken;
  const PackedMatrix matrix{static_cast<Format>(format), num_outputs, num_inputs, data};
  PoolLease pool;
  for_each_row(*pool, num_rows, num_inputs, [&](int64_t row) {
    unpack_row(matrix, outputs_R[row], rows_RI + row * num_inputs);
  });
}
}
