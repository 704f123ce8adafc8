// Drawing one token of a row by temperature, top-k, top-p and min-p.
#pragma once

#include <cstdint>

#include "sampling_rows.h"

namespace firsttoken {

struct DrawParams {
  double temperature;  // above 0
  int64_t top_k;       // 0, or the vocabulary's size and more: off
  double top_p;        // 1 and more: off
  double min_p;        // 0: off
};

// The first token whose cumulative weight exceeds uniform * total, in the order of ids, of what the
// filters leave; uniform is in (0, 1). The row has been scanned into `scratch`; it has a finite
// logit, and none is NaN or +inf.
int64_t draw_token(const float* logits_V, int64_t vocab_size, float largest,
                   const DrawParams& params, double uniform, RowScratch& scratch);

}  // namespace firsttoken
