// What a grammar allows of one row of logits.
#pragma once

#include <cstdint>

namespace firsttoken {

// -inf for each token whose bit (token % 32 of word token / 32) is 0.
void mask_row(float* logits_V, int64_t vocab_size, const int32_t* bitmask_W);

}  // namespace firsttoken
