#include "sampling_threshold.h"

#include <algorithm>
#include <array>

#include "sampling_lanes.h"

namespace firsttoken {
namespace {

constexpr int64_t kFew = 64;  // values that are sorted rather than halved once more

// Of the values at or above `bound`. A larger bound never gives a larger amount, rounded as it is:
// each sum has the same terms, some of them 0.
template <bool kCounts>
Reached reached_from(float bound, const float* values, const float* amounts, int64_t count) {
  constexpr int kStreams = 4;
  const F8 bounds = broadcast(bound);
  F8 sums[kStreams] = {};
  I8 counts[kStreams] = {};
  int64_t i = 0;
  for (; i + kStreams * kLanes <= count; i += kStreams * kLanes) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const int64_t at = i + stream * kLanes;
      const I8 above = load(values + at) >= bounds;
      counts[stream] -= above;
      if (!kCounts) sums[stream] += masked(load(amounts + at), above);
    }
  }
  double amount = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  int64_t num = sum((counts[0] + counts[1]) + (counts[2] + counts[3]));
  for (; i < count; ++i) {
    const bool above = values[i] >= bound;
    num += above;
    if (!kCounts) amount += above ? amounts[i] : 0.0f;
  }
  return {kCounts ? static_cast<double>(num) : amount, num};
}

// Keeps those in [low, high), in their order; `values` may be the scratch's own. Returns how many.
template <bool kCounts>
int64_t keep_between(float low, float high, const float* values, const float* amounts,
                     int64_t count, RowScratch& scratch) {
  float* kept_values = scratch.rest_values.data();
  float* kept_amounts = scratch.rest_amounts.data();
  int64_t num_kept = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F8 value = load(values + i);
    const int bits = bits_of((value >= broadcast(low)) & (value < broadcast(high)));
    // At most the vector just read is overwritten.
    const F8 amount = kCounts ? value : load(amounts + i);
    store(kept_values + num_kept, packed(value, bits));
    if (!kCounts) store(kept_amounts + num_kept, packed(amount, bits));
    num_kept += count_bits(bits);
  }
  for (; i < count; ++i) {
    if (!(values[i] >= low && values[i] < high)) continue;
    if (!kCounts) kept_amounts[num_kept] = amounts[i];
    kept_values[num_kept++] = values[i];
  }
  return num_kept;
}

struct Amount {
  float value;
  float amount;
};

// `threshold_reaching` for a few values, all of which are looked at.
template <bool kCounts>
float threshold_in_order(double goal, const float* values, const float* amounts, int64_t count) {
  std::array<Amount, kFew> few;
  for (int64_t i = 0; i < count; ++i) few[i] = {values[i], kCounts ? 1.0f : amounts[i]};
  std::sort(few.begin(), few.begin() + count,
            [](const Amount& a, const Amount& b) { return a.value > b.value; });
  double amount = 0.0;
  int64_t i = 0;
  while (i + 1 < count && (amount += few[i].amount) < goal) ++i;
  return few[i].value;
}

// Floats as integers of the same order.
int64_t order_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

float of_order(int64_t order) {
  auto bits = static_cast<int32_t>(order);
  bits ^= bits >> 31 & 0x7FFFFFFF;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Halves the distance at first. What that does not part, a crowd around 0 where floats are dense,
// takes halving the floats between them: 32 times at most.
float between(float low, float high, int num_halvings) {
  constexpr int kByDistance = 16;
  if (num_halvings < kByDistance) return low / 2 + high / 2;
  return of_order((order_of(low) + order_of(high)) >> 1);
}

//   values    |   low: reached  |  between: rest  |  high: not reached   |
//                                <-- halved --->   <- amount: `above` -->
template <bool kCounts>
float search_threshold(double goal, const float* values, const float* amounts, int64_t count,
                       float low, float high, RowScratch& scratch) {
  double above = 0.0;  // amounts that are no more among the values
  Reached from_low = reached_from<kCounts>(low, values, amounts, count), from_high = {0.0, 0};
  if (from_low.amount < goal) return low;
  for (int num_halvings = 0; from_low.count - from_high.count > kFew; ++num_halvings) {
    const float middle = between(low, high, num_halvings);
    if (!(low < middle && middle < high)) return low;  // all equal
    const Reached reached = reached_from<kCounts>(middle, values, amounts, count);
    if (above + reached.amount >= goal) {
      low = middle;
      from_low = reached;
    } else {
      high = middle;
      from_high = reached;
    }
    if (4 * (from_low.count - from_high.count) <= count) {
      count = keep_between<kCounts>(low, high, values, amounts, count, scratch);
      values = scratch.rest_values.data();
      amounts = scratch.rest_amounts.data();
      above += from_high.amount;
      from_low.count = count;
      from_high = {0.0, 0};
    }
  }
  count = keep_between<kCounts>(low, high, values, amounts, count, scratch);
  return threshold_in_order<kCounts>(goal - above - from_high.amount, scratch.rest_values.data(),
                                     scratch.rest_amounts.data(), count);
}

}  // namespace

Reached reached_from(float bound, const float* values, const float* weights, int64_t count) {
  return reached_from<false>(bound, values, weights, count);
}

float threshold_reaching(double goal, const float* values, const float* amounts, int64_t count,
                         float low, float high, RowScratch& scratch) {
  return amounts == nullptr
             ? search_threshold<true>(goal, values, amounts, count, low, high, scratch)
             : search_threshold<false>(goal, values, amounts, count, low, high, scratch);
}

float bound_of_top_k(int64_t k, int64_t vocab_size, Transform transform, float low, float high,
                     RowScratch& scratch) {
  const int64_t num_groups = (vocab_size + kRun - 1) / kRun * kLanes;
  if (k > num_groups) return low;
  float* maxima = scratch.rest_values.data();
  for (int64_t i = 0; i < num_groups; i += kLanes) {
    store(maxima + i, transform(load(scratch.group_maxima.data() + i)));
  }
  const auto goal = static_cast<double>(k);
  return threshold_reaching(goal, maxima, nullptr, num_groups, low, high, scratch);
}

}  // namespace firsttoken
