#include "linear_quantized.h"

namespace firsttoken {
namespace {

struct Int4 {
  using Block = Int4Block;
  static constexpr bool kHasOffsets = true;

#if defined(__AVX2__)
  static __m256i unpack(const Block& block, int step, int half) {
    const __m256i four = load_bytes(block.quants[step / 4][half]);
    return _mm256_and_si256(_mm256_srli_epi16(four, step % 4 * 4), _mm256_set1_epi16(15));
  }
#endif
};

}  // namespace

void int4_tile(const Int4Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16) {
  quantized_tile<Int4>(blocks, num_groups, x, y_T16);
}

}  // namespace firsttoken
