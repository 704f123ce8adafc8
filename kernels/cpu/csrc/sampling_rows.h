// Passes over one row of logits, [V]: what all of sampling is made of.
//
// Numbers are grouped lane by lane, so that the maxima of groups cost no reduction over lanes:
//
//     run of 128    vector 0  | l0 l1 .. l7 |
//                     ...                         group: the 16 numbers of one lane
//                   vector 15 | l0 l1 .. l7 |
//
// The k-th largest of the groups' maxima has k numbers at or above it: so the likeliest tokens are
// found without a sort of the row, and runs that hold none of them are skipped.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_lanes.h"

namespace firsttoken {

constexpr int64_t kRun = 128;

// Memory that grows to a vocabulary's size and is then kept, one a thread.
struct RowScratch {
  std::vector<float> group_maxima;  // 8 for each run; -inf where a group is empty
  std::vector<float> raw_logits;    // before any edit
  std::vector<float> values;        // of candidates, in the order of token ids
  std::vector<float> weights;       // of those; or of the whole row
  std::vector<int32_t> token_ids;   // of those
  std::vector<float> rest_values;   // what a search has not decided yet
  std::vector<float> rest_amounts;
  std::vector<float> saved_logits;  // of tokens that are taken away and may come back

  void resize(int64_t vocab_size);
};

struct RowScan {
  float largest;  // of what is a number, as is the smallest
  float smallest;
  bool all_below_infinity;  // no NaN, and no infinity above

  bool is_finite() const { return all_below_infinity && smallest > -kInfinity; }
  bool has_tokens() const { return all_below_infinity && largest > -kInfinity; }
};

// Fills the maxima of groups.
RowScan scan_row(const float* logits_V, int64_t vocab_size, float* group_maxima);

// The lowest id of a largest logit.
int64_t first_largest(const float* logits_V, int64_t vocab_size, const float* group_maxima,
                      float largest);

// How many logits are larger than a given one.
int64_t count_larger(const float* logits_V, int64_t vocab_size, float logit);

// A logit as a candidate's value: (logit - largest) * scale, the same for equal logits.
struct Transform {
  float largest;
  float scale;

  F8 operator()(F8 logits) const { return (logits - largest) * scale; }
};

// e^value of each of the row's values; returns their sum. `weights` has room for whole vectors.
double weigh_row(const float* logits_V, int64_t vocab_size, Transform transform, float* weights);

// Gathers value, weight and id of each token whose value is at least `lowest`, which is above -inf,
// in the order of ids; returns how many. `weighed`: the row's weights are in the scratch already.
int64_t collect(const float* logits_V, int64_t vocab_size, Transform transform, float lowest,
                bool weighed, RowScratch& scratch);

}  // namespace firsttoken
