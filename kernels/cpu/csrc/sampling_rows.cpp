#include "sampling_rows.h"

#include <algorithm>

#include "sampling_lanes.h"

namespace firsttoken {

void RowScratch::resize(int64_t vocab_size) {
  const auto size = static_cast<size_t>((vocab_size + kRun - 1) / kRun * kRun + kLanes);
  if (values.size() >= size) return;
  group_maxima.resize(size / kRun * kLanes);
  for (auto* floats : {&raw_logits, &values, &weights, &rest_values, &rest_amounts}) {
    floats->resize(size);
  }
  token_ids.resize(size);
}

RowScan scan_row(const float* logits_V, int64_t vocab_size, float* group_maxima) {
  const F8 infinity = broadcast(kInfinity);
  F8 smallest = infinity, largest_of_row = broadcast(-kInfinity);
  I8 below = ~I8{};  // infinity: no NaN is
  for (int64_t first = 0; first < vocab_size; first += kRun, group_maxima += kLanes) {
    F8 maximum = broadcast(-kInfinity);
    const auto take = [&](F8 logits) {
      below &= logits < infinity;
      maximum = max(logits, maximum);
      smallest = min(logits, smallest);
    };
    const int64_t last = std::min(first + kRun, vocab_size);
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) take(load(logits_V + i));
    if (i < last) {
      const F8 left = load_up_to(logits_V + i, last - i);
      below &= left < infinity;
      maximum = max(left, maximum);
      for (; i < last; ++i) smallest = min(broadcast(logits_V[i]), smallest);
    }
    store(group_maxima, maximum);
    largest_of_row = max(maximum, largest_of_row);
  }
  return {largest(largest_of_row), -largest(-smallest), bits_of(below) == 0xFF};
}

int64_t first_largest(const float* logits_V, int64_t vocab_size, const float* group_maxima,
                      float largest) {
  int64_t first = 0;
  while (bits_of(load(group_maxima + first / kRun * kLanes) == broadcast(largest)) == 0) {
    first += kRun;
  }
  for (int64_t i = first;; i += kLanes) {
    const int bits = bits_of(load_up_to(logits_V + i, vocab_size - i) == broadcast(largest));
    if (bits != 0) return i + lowest_bit(bits);
  }
}

int64_t count_larger(const float* logits_V, int64_t vocab_size, float logit) {
  I8 counts = {};
  for (int64_t i = 0; i < vocab_size; i += kLanes) {
    counts -= load_up_to(logits_V + i, vocab_size - i) > broadcast(logit);
  }
  return sum(counts);
}

int64_t collect(const float* logits_V, int64_t vocab_size, Transform transform, float lowest,
                bool weighed, RowScratch& scratch) {
  const F8 bounds = broadcast(lowest);
  const I8 places = {0, 1, 2, 3, 4, 5, 6, 7};
  float* values = scratch.values.data();
  float* weights = scratch.weights.data();
  int32_t* token_ids = scratch.token_ids.data();
  int64_t count = 0;
  for (int64_t first = 0; first < vocab_size; first += kRun) {
    const F8 maxima = transform(load(scratch.group_maxima.data() + first / kRun * kLanes));
    if (bits_of(maxima >= bounds) == 0) continue;
    const int64_t last = std::min(first + kRun, vocab_size);
    for (int64_t i = first; i < last; i += kLanes) {
      const F8 value = transform(load_up_to(logits_V + i, last - i));
      const int bits = bits_of(value >= bounds);  // often a few, seldom foreseeable: no branch
      if (weighed) store(weights + count, packed(load(weights + i), bits));
      store(values + count, packed(value, bits));
      const I8 ids = packed(places + static_cast<int32_t>(i), bits);
      std::memcpy(token_ids + count, &ids, sizeof ids);
      count += count_bits(bits);
    }
  }
  if (!weighed) {
    for (int64_t i = 0; i < count; i += kLanes) store(weights + i, exp(load(values + i)));
  }
  return count;
}

double weigh_row(const float* logits_V, int64_t vocab_size, Transform transform, float* weights) {
  double total = 0.0;
  int64_t i = 0;
  while (i + kRun <= vocab_size) {
    F8 even = broadcast(0.0f), odd = broadcast(0.0f);
    for (const int64_t last = i + kRun; i < last; i += 2 * kLanes) {
      const F8 first = exp(transform(load(logits_V + i)));
      const F8 second = exp(transform(load(logits_V + i + kLanes)));
      store(weights + i, first);
      store(weights + i + kLanes, second);
      even += first;
      odd += second;
    }
    total += sum(even + odd);
  }
  F8 rest = broadcast(0.0f);
  for (; i < vocab_size; i += kLanes) {
    const F8 weight = exp(transform(load_up_to(logits_V + i, vocab_size - i)));
    store(weights + i, weight);
    rest += weight;
  }
  return total + sum(rest);
}

}  // namespace firsttoken
