// How a packed matrix lies in memory: tiles of 16 outputs, each over all inputs.
//
//     kFloat32   tile   [I][16] float
//     kInt8      tile   an Int8Block of each 32 inputs, in order
//     kInt4      tile   an Int4Block of each 32 inputs, in order
//
// Within a block, some neighbouring inputs of 8 outputs lie together, so that a product with those
// numbers of a row, repeated for each output, adds up within the output's lane:
//
//     int8    byte         0      1      | 2     3      | ... |
//             output       0             | 1            | ... 7                    (or 8 to 15)
//             input        i      i + 1  | the same two for each
//
//     int4    byte         0      1      2      3      | 4 ...  | ... |
//             output       0                           | 1      | ... 7
//             input        i      i + 1  i + 2  i + 3  | the same four for each: the low bits;
//                          i + 4  i + 5  i + 6  i + 7  | ...                     the high bits
//
// What is past the matrix's last output or input is zero.
#pragma once

#include <cstdint>

namespace firsttoken {

constexpr int kTileOutputs = 16;
constexpr int kGroupInputs = 32;

// weight = scale * quant, quant in [-127, 127].
struct Int8Block {
  int8_t quants[16][2][8][2];  // [inputs 2s, 2s + 1][half of the outputs][output][input]
  uint16_t scales[kTileOutputs];
};

// weight = scale * quant + offset, quant in [0, 15].
struct Int4Block {
  uint8_t quants[4][2][8][4];  // [8 inputs][half of the outputs][output][input, and the 4th after]
  uint16_t scales[kTileOutputs];
  uint16_t offsets[kTileOutputs];
};

inline int quant_at(const Int8Block& block, int input, int output) {
  return block.quants[input / 2][output / 8][output % 8][input % 2];
}

inline int quant_at(const Int4Block& block, int input, int output) {
  const uint8_t both = block.quants[input / 8][output / 8][output % 8][input % 4];
  return input % 8 < 4 ? both & 15 : both >> 4;
}

static_assert(sizeof(Int8Block) == 544 && sizeof(Int4Block) == 320, "no gaps");

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace firsttoken
