// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), as
// kernels/reference/random_uniform.py explains it.
#include <cstdint>

namespace firsttoken {
namespace {

constexpr int kRounds = 10;

// The first of the four words that a counter gives under a key.
uint32_t philox_word(uint32_t c0, uint32_t c1, uint64_t key) {
  uint32_t c2 = 0, c3 = 0;
  auto key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product_0 = uint64_t{0xD2511F53} * c0, product_2 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product_2 >> 32) ^ c1 ^ key_low;
    c1 = static_cast<uint32_t>(product_2);
    c2 = static_cast<uint32_t>(product_0 >> 32) ^ c3 ^ key_high;
    c3 = static_cast<uint32_t>(product_0);
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return c0;
}

}  // namespace
}  // namespace firsttoken

extern "C" {

// Strictly between 0 and 1, each of its own seed, sample index and position.
void ft_random_uniforms(int64_t count, const uint64_t* seeds, const int64_t* sample_indices,
                        const int64_t* positions, double* uniforms) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = firsttoken::philox_word(
        static_cast<uint32_t>(positions[i]), static_cast<uint32_t>(sample_indices[i]), seeds[i]);
    uniforms[i] = (word + 0.5) / 4294967296.0;
  }
}
}
