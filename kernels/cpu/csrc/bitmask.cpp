#include "bitmask.h"

#include <algorithm>
#include <limits>

#include "simd.h"

namespace firsttoken {
namespace {

constexpr int kWordBits = 32;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// Where a bit of the lowest eight is 0, the lane becomes -inf.
F8 masked(F8 logits, int32_t bits) {
  const I8 places = {1, 2, 4, 8, 16, 32, 64, 128};
  const I8 words = {bits, bits, bits, bits, bits, bits, bits, bits};
  return (words & places) != 0 ? logits : broadcast(kForbidden);
}

}  // namespace

void mask_row(float* logits_V, int64_t vocab_size, const int32_t* bitmask_W) {
  const int64_t num_whole_words = vocab_size / kWordBits;
  for (int64_t w = 0; w < num_whole_words; ++w) {
    const int32_t word = bitmask_W[w];
    float* logits = logits_V + w * kWordBits;
    if (word == -1) continue;  // most words are all ones or all zeros
    if (word == 0) {
      std::fill_n(logits, kWordBits, kForbidden);
      continue;
    }
    for (int bit = 0; bit < kWordBits; bit += kLanes) {
      store(logits + bit, masked(load(logits + bit), word >> bit));
    }
  }
  for (int64_t token = num_whole_words * kWordBits; token < vocab_size; ++token) {
    const bool allowed = (bitmask_W[token / kWordBits] >> (token % kWordBits)) & 1;
    if (!allowed) logits_V[token] = kForbidden;
  }
}

}  // namespace firsttoken
