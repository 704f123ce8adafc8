#include "linear_quantized.h"

namespace firsttoken {
namespace {

struct Int8 {
  using Block = Int8Block;
  using RowValue = Int8RowValue;
  static constexpr bool kHasOffsets = false;
  static constexpr bool kHasLowParts = false;

#if defined(FIRSTTOKEN_AVX512)
  // Two inputs at a time, in lanes of 32 bits.
  template <int kRows>
  static void multiply(const Block& block, const RowValue* x, __m512i (&dots)[kRows]) {
    for (int r = 0; r < kRows; ++r) dots[r] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int step = 0; step < kGroupInputs / 2; ++step) {
      const __m512i w = _mm512_cvtepi8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&block.quants[step])));
      for (int r = 0; r < kRows; ++r) {
        dots[r] = _mm512_dpwssd_epi32(dots[r], w, repeat_bytes(x + r * kGroupInputs + step * 2));
      }
    }
  }
#elif defined(__AVX2__)
  // Two inputs at a time, in lanes of 32 bits.
  template <int kRows>
  static void multiply(const Block& block, const RowValue* x, I8 (&dots)[kRows][kHalves]) {
    __m256i sums[kRows][kHalves] = {};
#pragma GCC unroll 16
    for (int step = 0; step < kGroupInputs / 2; ++step) {
      __m256i w0 = widened(block.quants[step][0]), w1 = widened(block.quants[step][1]);
      settle(w0, w1);
      for (int r = 0; r < kRows; ++r) {
        const __m256i two = repeat_bytes(x + r * kGroupInputs + step * 2);
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(w0, two));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(w1, two));
        settle(sums[r][0], sums[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < kHalves; ++half) dots[r][half] = reinterpret_cast<I8>(sums[r][half]);
    }
  }

  static __m256i widened(const void* bytes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
  }
#endif
};

}  // namespace

void int8_tile(const Int8Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16) {
  quantized_tile<Int8>(blocks, num_groups, x, y_T16);
}

}  // namespace firsttoken
