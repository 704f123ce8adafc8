#include "linear_quantized.h"

namespace firsttoken {
namespace {

struct Int8 {
  using Block = Int8Block;
  static constexpr bool kHasOffsets = false;

#if defined(__AVX2__)
  static __m256i unpack(const Block& block, int step, int half) {
    return _mm256_cvtepi8_epi16(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.quants[step][half])));
  }
#endif
};

}  // namespace

void int8_tile(const Int8Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16) {
  quantized_tile<Int8>(blocks, num_groups, x, y_T16);
}

}  // namespace firsttoken
