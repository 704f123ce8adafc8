#include "linear_quantized.h"

namespace firsttoken {
namespace {

struct Int4 {
  using Block = Int4Block;
  using RowValue = Int4RowValue;
  static constexpr bool kHasOffsets = true;
  static constexpr bool kHasLowParts = true;

#if defined(FIRSTTOKEN_AVX512)
  // Four inputs at a time, in lanes of 32 bits.
  template <int kRows>
  static void multiply(const Block& block, const RowValue* x, __m512i (&dots)[kRows]) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    for (int r = 0; r < kRows; ++r) dots[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int step = 0; step < kGroupInputs / 8; ++step) {
      const __m512i both = _mm512_loadu_si512(&block.quants[step]);
      const __m512i w0 = _mm512_and_si512(both, low_bits);
      const __m512i w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
      for (int r = 0; r < kRows; ++r) {
        const RowValue* const eight = x + r * kGroupInputs + step * 8;
        dots[r] = _mm512_dpbusd_epi32(dots[r], w0, repeat_bytes(eight));
        dots[r] = _mm512_dpbusd_epi32(dots[r], w1, repeat_bytes(eight + 4));
      }
    }
  }
#elif defined(__AVX2__)
  // Four inputs at a time, in lanes of 16 bits: a group's eight sums of two products are at most
  // 8 * 2 * 15 * 128 = 30,720.
  template <int kRows>
  static void multiply(const Block& block, const RowValue* x, I8 (&dots)[kRows][kHalves]) {
    __m256i sums[kRows][kHalves];
#pragma GCC unroll 8
    for (int step = 0; step < kGroupInputs / 4; ++step) {
      __m256i w0 = four_bits(block, step, 0), w1 = four_bits(block, step, 1);
      settle(w0, w1);
      for (int r = 0; r < kRows; ++r) {
        const __m256i four = repeat_bytes(x + r * kGroupInputs + step * 4);
        const __m256i y0 = _mm256_maddubs_epi16(w0, four), y1 = _mm256_maddubs_epi16(w1, four);
        sums[r][0] = step == 0 ? y0 : _mm256_add_epi16(sums[r][0], y0);
        sums[r][1] = step == 0 ? y1 : _mm256_add_epi16(sums[r][1], y1);
        settle(sums[r][0], sums[r][1]);
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < kHalves; ++half) {
        dots[r][half] = reinterpret_cast<I8>(_mm256_madd_epi16(sums[r][half], ones));
      }
    }
  }

  static __m256i four_bits(const Block& block, int step, int half) {
    const __m256i both = load_bytes(block.quants[step / 2][half]);
    return _mm256_and_si256(_mm256_srli_epi16(both, step % 2 * 4), _mm256_set1_epi8(15));
  }
#endif
};

}  // namespace

void int4_tile(const Int4Block* blocks, int64_t num_groups, const RowBlock& x, float* y_T16) {
  quantized_tile<Int4>(blocks, num_groups, x, y_T16);
}

}  // namespace firsttoken
