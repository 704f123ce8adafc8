// Log probabilities of one row's tokens under softmax(logits).
#pragma once

#include <cstdint>

#include "sampling_rows.h"

namespace firsttoken {

// ln of the sum of e^(logit - largest).
double log_total(const float* logits_V, int64_t vocab_size, float largest, RowScratch& scratch);

inline float logprob(float logit, float largest, double log_total) {
  return static_cast<float>(static_cast<double>(logit) - largest - log_total);
}

// The `num_top` likeliest tokens, equals in the order of ids, and their logprobs. `scan` is of this
// row, as is what it left in `scratch`; the row is finite, and 0 <= num_top <= V.
void top_logprobs(const float* logits_V, int64_t vocab_size, const RowScan& scan, double log_total,
                  int64_t num_top, int64_t* token_ids, float* logprobs, RowScratch& scratch);

}  // namespace firsttoken
