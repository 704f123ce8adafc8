// What a step samples, as `kernels/sampling_batch.py` describes it: plain views of the caller's
// arrays. `kernels/cpu/sampling.py` lays out the same structures.
#pragma once

#include <cstdint>

namespace firsttoken {

// Token ids of some rows, ascending. Those of row rows_E[e] are [starts_E1[e], starts_E1[e + 1]).
struct RowTokens {
  int64_t num_rows;  // E
  const int64_t* rows_E;
  const int64_t* starts_E1;
  const int64_t* token_ids_P;
};

struct SamplingBatch {
  float* logits_RV;
  int64_t num_rows;    // R
  int64_t vocab_size;  // V

  RowTokens counted;
  const int64_t* output_counts_P;
  const float* repetition_E;
  const double* frequency_E;
  const double* presence_E;

  RowTokens biased;
  const float* biases_P;
  RowTokens allowed;
  RowTokens banned;
  RowTokens early_ends;

  int64_t num_masked;  // G
  const int64_t* masked_rows_G;
  const int32_t* bitmask_GW;
  int64_t words_per_row;  // W

  int64_t num_drawn;  // D
  const int64_t* drawn_rows_D;
  const double* temperature_D;
  const int64_t* top_k_D;
  const double* top_p_D;
  const double* min_p_D;
  const double* uniform_D;

  int64_t num_told;  // L
  const int64_t* told_rows_L;
  const int64_t* num_top_L;
};

struct SampledLogprobs {
  int64_t most_top;  // N
  float* logprobs_L;
  int64_t* ranks_L;
  int64_t* top_token_ids_LN;
  float* top_logprobs_LN;
};

enum RowStatus : int32_t { kSampled = 0, kNotFinite = 1, kNothingAllowed = 2, kOverflows = 3 };

}  // namespace firsttoken
