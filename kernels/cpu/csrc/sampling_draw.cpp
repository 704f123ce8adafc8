#include "sampling_draw.h"

#include <algorithm>
#include <cmath>

#include "sampling_threshold.h"

namespace firsttoken {
namespace {

// Values are logarithms of weights, the largest is 0. What lies lower weighs less than 1e-37 of it,
// and `exp` makes it 0.
constexpr float kWeighsNothing = -87.3f;
constexpr float kAboveAll = std::numeric_limits<float>::min();

constexpr int64_t kBlock = 64;  // weights that are added first

// Kept tokens, in the order of ids.
struct Kept {
  const float* weights;
  const int32_t* token_ids;  // null: the weights are of the whole row
  int64_t count;
};

bool filters_top_k(const DrawParams& params, int64_t vocab_size) {
  return params.top_k > 0 && params.top_k < vocab_size;
}

float lowest_of_min_p(const DrawParams& params) {
  return params.min_p > 0.0 ? static_cast<float>(std::log(params.min_p)) : -kInfinity;
}

// What no filter can need lies lower than this.
float lowest_candidate(int64_t vocab_size, Transform transform, const DrawParams& params,
                       RowScratch& scratch) {
  const bool has_top_k = filters_top_k(params, vocab_size), has_top_p = params.top_p < 1.0;
  float lowest = kWeighsNothing;
  if (has_top_k) {
    lowest = bound_of_top_k(params.top_k, vocab_size, transform, lowest, kAboveAll, scratch);
  } else if (has_top_p) {
    // Tokens below log((1 - p) / V) weigh less than 1 - p together, and all weigh at least 1.
    const double rest = (1.0 - params.top_p) / static_cast<double>(vocab_size);
    constexpr double kForRounding = 0.01;
    lowest = std::max(lowest, static_cast<float>(std::log(rest) - kForRounding));
  }
  // A share of the k likeliest is one of all k.
  return has_top_k && has_top_p ? lowest : std::max(lowest, lowest_of_min_p(params));
}

// What the k likeliest weigh: of those that equal the last, as many as complete k.
double weight_of_top_k(int64_t k, float kth, int64_t count, const RowScratch& scratch) {
  const float above_kth = std::nextafter(kth, kInfinity);
  const Reached above =
      reached_from(above_kth, scratch.values.data(), scratch.weights.data(), count);
  const float weight_of_kth = exp(broadcast(kth))[0];
  return above.amount + static_cast<double>(std::min(k, count) - above.count) * weight_of_kth;
}

// The lowest value of what stays of the candidates, none of which is below `lowest`.
float lowest_kept(const DrawParams& params, bool has_top_k, double total, int64_t count,
                  float lowest, RowScratch& scratch) {
  const float* values = scratch.values.data();
  if (has_top_k) {
    lowest = threshold_reaching(static_cast<double>(params.top_k), values, nullptr, count, lowest,
                                kAboveAll, scratch);
    if (params.top_p < 1.0) total = weight_of_top_k(params.top_k, lowest, count, scratch);
  }
  if (params.top_p < 1.0) {
    lowest = threshold_reaching(params.top_p * total, values, scratch.weights.data(), count, lowest,
                                kAboveAll, scratch);
  }
  return std::max(lowest, lowest_of_min_p(params));
}

Kept filtered(const float* logits_V, int64_t vocab_size, Transform transform,
              const DrawParams& params, RowScratch& scratch) {
  const bool has_top_k = filters_top_k(params, vocab_size);
  const bool is_share_of_all = params.top_p < 1.0 && !has_top_k;
  float* weights = scratch.weights.data();
  double total = 0.0;  // of the whole row, where it is needed
  if (is_share_of_all) total = weigh_row(logits_V, vocab_size, transform, weights);
  const float lowest = lowest_candidate(vocab_size, transform, params, scratch);
  const int64_t count =
      collect(logits_V, vocab_size, transform, lowest, is_share_of_all, scratch);
  const F8 bounds = broadcast(lowest_kept(params, has_top_k, total, count, lowest, scratch));
  for (int64_t i = 0; i < count; i += kLanes) {
    const I8 stays = load(scratch.values.data() + i) >= bounds;
    store(weights + i, masked(load(weights + i), stays));
  }
  return {weights, scratch.token_ids.data(), count};
}

float sum_block(const float* weights, int64_t count) {
  F8 sums = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load(weights + i);
  float total = sum(sums);
  for (; i < count; ++i) total += weights[i];
  return total;
}

// The place of the first weight with which the sum exceeds uniform * total.
int64_t invert_sum(const float* weights, int64_t count, double uniform, RowScratch& scratch) {
  const int64_t num_blocks = (count + kBlock - 1) / kBlock;
  float* block_sums = scratch.rest_amounts.data();
  double total = 0.0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t first = block * kBlock;
    block_sums[block] = sum_block(weights + first, std::min(kBlock, count - first));
    total += block_sums[block];
  }
  const double target = uniform * total;
  double sum = 0.0;
  int64_t block = 0;  // sums of blocks come to the total again, which is above the target
  while (sum + block_sums[block] <= target) sum += block_sums[block++];
  const int64_t last = std::min((block + 1) * kBlock, count);
  int64_t found = block * kBlock;
  for (int64_t i = found; i < last && sum <= target; ++i) {
    sum += weights[i];
    if (weights[i] > 0.0f) found = i;  // the last one, should rounding keep the sum below
  }
  return found;
}

}  // namespace

int64_t draw_token(const float* logits_V, int64_t vocab_size, float largest,
                   const DrawParams& params, double uniform, RowScratch& scratch) {
  // A temperature so high that its inverse is 0 would make -inf a NaN.
  const double scale = std::max(1.0 / params.temperature,
                                static_cast<double>(std::numeric_limits<float>::min()));
  const Transform transform = {largest, static_cast<float>(scale)};
  if (filters_top_k(params, vocab_size) || params.top_p < 1.0 || params.min_p > 0.0) {
    const Kept kept = filtered(logits_V, vocab_size, transform, params, scratch);
    return kept.token_ids[invert_sum(kept.weights, kept.count, uniform, scratch)];
  }
  weigh_row(logits_V, vocab_size, transform, scratch.weights.data());
  return invert_sum(scratch.weights.data(), vocab_size, uniform, scratch);
}

}  // namespace firsttoken
