#include "sampling_logprobs.h"

#include <algorithm>
#include <cmath>

#include "sampling_threshold.h"

namespace firsttoken {

double log_total(const float* logits_V, int64_t vocab_size, float largest, RowScratch& scratch) {
  return std::log(weigh_row(logits_V, vocab_size, {largest, 1.0f}, scratch.weights.data()));
}

void top_logprobs(const float* logits_V, int64_t vocab_size, const RowScan& scan, double log_total,
                  int64_t num_top, int64_t* token_ids, float* logprobs, RowScratch& scratch) {
  if (num_top == 0) return;
  constexpr Transform kAsTheyAre = {0.0f, 1.0f};
  const float above_all = std::nextafter(scan.largest, kInfinity);
  const float lowest =
      bound_of_top_k(num_top, vocab_size, kAsTheyAre, scan.smallest, above_all, scratch);
  const int64_t count = collect(logits_V, vocab_size, kAsTheyAre, lowest, true, scratch);
  int32_t* ids = scratch.token_ids.data();
  std::partial_sort(ids, ids + num_top, ids + count, [&](int32_t a, int32_t b) {
    return logits_V[a] != logits_V[b] ? logits_V[a] > logits_V[b] : a < b;
  });
  for (int64_t i = 0; i < num_top; ++i) {
    token_ids[i] = ids[i];
    logprobs[i] = logprob(logits_V[ids[i]], scan.largest, log_total);
  }
}

}  // namespace firsttoken
