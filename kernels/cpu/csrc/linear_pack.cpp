// Matrices into tiles of 16 outputs (linear_layout.h), and single rows back.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "linear_layout.h"
#include "simd.h"

namespace firsttoken {
namespace {

constexpr int kVectors = kGroupInputs / kLanes;  // of one output in a group

// Up to 32 weights of one output, repeated into the lanes past the last.
struct Group {
  F8 values[kVectors];

  Group(const float* from, int count) {
    float padded[kGroupInputs];
    for (int i = 0; i < kGroupInputs; ++i) padded[i] = from[std::min(i, count - 1)];
    for (int v = 0; v < kVectors; ++v) values[v] = load(padded + v * kLanes);
  }

  float largest_value() const {
    return largest(max(max(values[0], values[1]), max(values[2], values[3])));
  }

  float smallest_value() const {
    const F8 smallest = min(min(values[0], values[1]), min(values[2], values[3]));
    return -largest(-smallest);
  }

  // (value - offset) / scale, rounded, within the bounds; zeros where the scale is zero.
  void quantize(float offset, float scale, float lowest, float highest, int32_t* quants) const {
    for (int v = 0; v < kVectors; ++v) {
      const F8 scaled = (values[v] - offset) / scale;
      const F8 bounded = min(max(scaled, broadcast(lowest)), broadcast(highest));
      const I8 rounded = scale == 0.0f ? I8{} : round_to_int(bounded);
      std::memcpy(quants + v * kLanes, &rounded, sizeof rounded);
    }
  }
};

void pack_output(const Group& group, int output, Int8Block& block) {
  const float amax = std::max(group.largest_value(), -group.smallest_value());
  block.scales[output] = float_to_half(amax / 127.0f);
  int32_t quants[kGroupInputs];
  group.quantize(0.0f, half_to_float(block.scales[output]), -127.0f, 127.0f, quants);
  for (int i = 0; i < kGroupInputs; ++i) {
    block.quants[i / 2][output / 8][output % 8][i % 2] = static_cast<int8_t>(quants[i]);
  }
}

void pack_output(const Group& group, int output, Int4Block& block) {
  const float lowest = group.smallest_value();
  block.scales[output] = float_to_half((group.largest_value() - lowest) / 15.0f);
  block.offsets[output] = float_to_half(lowest);
  int32_t quants[kGroupInputs];
  group.quantize(half_to_float(block.offsets[output]), half_to_float(block.scales[output]), 0.0f,
                 15.0f, quants);
  for (int i = 0; i < kGroupInputs; ++i) {
    uint8_t& both = block.quants[i / 8][output / 8][output % 8][i % 4];
    const auto quant = static_cast<uint8_t>(quants[i]);
    both = i % 8 < 4 ? quant : both | static_cast<uint8_t>(quant << 4);
  }
}

template <class Block>
void pack_quantized_tile(const float* weight_OI, int num_outputs, int64_t num_inputs,
                         Block* blocks) {
  for (int64_t first = 0; first < num_inputs; first += kGroupInputs) {
    const auto count = static_cast<int>(std::min<int64_t>(kGroupInputs, num_inputs - first));
    Block& block = blocks[first / kGroupInputs];
    std::memset(&block, 0, sizeof block);
    for (int output = 0; output < num_outputs; ++output) {
      pack_output(Group(weight_OI + output * num_inputs + first, count), output, block);
    }
  }
}

void pack_float32_tile(const float* weight_OI, int num_outputs, int64_t num_inputs, float* tile) {
  for (int64_t input = 0; input < num_inputs; ++input) {
    for (int output = 0; output < kTileOutputs; ++output) {
      *tile++ = output < num_outputs ? weight_OI[output * num_inputs + input] : 0.0f;
    }
  }
}

int64_t tile_bytes(Format format, int64_t num_inputs) {
  const int64_t num_groups = ceil_div(num_inputs, kGroupInputs);
  switch (format) {
    case Format::kFloat32:
      return num_inputs * kTileOutputs * static_cast<int64_t>(sizeof(float));
    case Format::kInt8:
      return num_groups * static_cast<int64_t>(sizeof(Int8Block));
    case Format::kInt4:
      return num_groups * static_cast<int64_t>(sizeof(Int4Block));
  }
  return 0;
}

float offset_at(const Int8Block&, int) { return 0.0f; }

float offset_at(const Int4Block& block, int output) {
  return half_to_float(block.offsets[output]);
}

template <class Block>
void unpack_quantized_row(const Block* blocks, int output, int64_t num_inputs, float* row_I) {
  for (int64_t first = 0; first < num_inputs; first += kGroupInputs) {
    const Block& block = blocks[first / kGroupInputs];
    const float scale = half_to_float(block.scales[output]);
    const float offset = offset_at(block, output);
    const auto count = static_cast<int>(std::min<int64_t>(kGroupInputs, num_inputs - first));
    for (int i = 0; i < count; ++i) {
      row_I[first + i] = scale * static_cast<float>(quant_at(block, i, output)) + offset;
    }
  }
}

}  // namespace

int64_t packed_bytes(Format format, int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kTileOutputs) * tile_bytes(format, num_inputs);
}

void pack_matrix(ThreadPool& pool, Format format, const float* weight_OI, int64_t num_outputs,
                 int64_t num_inputs, uint8_t* packed) {
  pool.for_each(ceil_div(num_outputs, kTileOutputs), [&](int64_t tile, int) {
    const int64_t first = tile * kTileOutputs;
    const auto count = static_cast<int>(std::min<int64_t>(kTileOutputs, num_outputs - first));
    const float* from = weight_OI + first * num_inputs;
    uint8_t* to = packed + tile * tile_bytes(format, num_inputs);
    switch (format) {
      case Format::kFloat32:
        return pack_float32_tile(from, count, num_inputs, reinterpret_cast<float*>(to));
      case Format::kInt8:
        return pack_quantized_tile(from, count, num_inputs, reinterpret_cast<Int8Block*>(to));
      case Format::kInt4:
        return pack_quantized_tile(from, count, num_inputs, reinterpret_cast<Int4Block*>(to));
    }
  });
}

void unpack_row(const PackedMatrix& matrix, int64_t output, float* row_I) {
  const auto within = static_cast<int>(output % kTileOutputs);
  const uint8_t* tile =
      matrix.data + output / kTileOutputs * tile_bytes(matrix.format, matrix.num_inputs);
  switch (matrix.format) {
    case Format::kFloat32: {
      const float* column = reinterpret_cast<const float*>(tile) + within;
      for (int64_t i = 0; i < matrix.num_inputs; ++i) row_I[i] = column[i * kTileOutputs];
      return;
    }
    case Format::kInt8:
      return unpack_quantized_row(reinterpret_cast<const Int8Block*>(tile), within,
                                  matrix.num_inputs, row_I);
    case Format::kInt4:
      return unpack_quantized_row(reinterpret_cast<const Int4Block*>(tile), within,
                                  matrix.num_inputs, row_I);
  }
}

}  // namespace firsttoken
