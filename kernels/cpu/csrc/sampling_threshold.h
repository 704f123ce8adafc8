// Where a filter cuts: by halving, without a sort.
#pragma once

#include <cstdint>

#include "sampling_rows.h"

namespace firsttoken {

struct Reached {
  double amount;
  int64_t count;
};

// How many of the values are at or above `bound`, and what they weigh.
Reached reached_from(float bound, const float* values, const float* weights, int64_t count);

// The largest t in [low, high) with: the amounts of all values >= t come to `goal`; `low` if they
// never do. Values lie below `high`; `amounts` may be null, then each is 1.
float threshold_reaching(double goal, const float* values, const float* amounts, int64_t count,
                         float low, float high, RowScratch& scratch);

// A bound in [low, high) that at least k of the row's values reach, and few more; `low` if that
// takes a wider search.
float bound_of_top_k(int64_t k, int64_t vocab_size, Transform transform, float low, float high,
                     RowScratch& scratch);

}  // namespace firsttoken
