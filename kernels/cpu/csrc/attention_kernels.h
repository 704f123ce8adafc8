// The inner loops of attention: a few query rows against a run of keys.
//
// A row's numbers are computed in one order, whatever rows are beside it and wherever keys and
// values are read from:
//
//     score     dimensions ascending, one fused multiply-add each
//     weights   vectors of 8 keys at absolute positions, ascending; powers of two, not of e
//     sums      keys ascending, one fused multiply-add each
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cache_view.h"
#include "simd.h"

// A loop over an array of vectors has to be gone before registers are given out.
#define FT_UNROLLED _Pragma("GCC unroll 8")

namespace firsttoken {

constexpr int kMicroRows = 6;        // with two vectors of keys each, they fill the registers
constexpr int kChunkKeys = 16;       // two vectors of keys
constexpr int kPanelColumns = 16;    // of packed values, two vectors
constexpr int kPartitionKeys = 256;  // what a row's weights are normalised over at a time
constexpr int kPartitionChunks = kPartitionKeys / kChunkKeys;

// Memory answers after about as long as these take to compute: nobody else fetches ahead across
// blocks, which may lie anywhere.
constexpr int kChunksAhead = 4;

inline void fetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// Calls body(integral_constant<int, rows>()), 1 <= rows <= kMicroRows.
template <class Body>
void with_rows(int rows, Body&& body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    default: return body(std::integral_constant<int, 6>());
  }
}

// sums[r][v] += weight_of(r) * load_vector(v). What there is less of, weights or vectors, is held
// in registers beside the sums.
template <int kRows, int kVectors, class LoadVector, class WeightOf>
inline void add_products(F8 (&sums)[kRows][kVectors], LoadVector load_vector, WeightOf weight_of) {
  if constexpr (kRows < kVectors) {
    F8 weights[kRows];
    FT_UNROLLED for (int r = 0; r < kRows; ++r) weights[r] = broadcast(weight_of(r));
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) {
      const F8 vector = load_vector(v);
      FT_UNROLLED for (int r = 0; r < kRows; ++r) sums[r][v] = fma(weights[r], vector, sums[r][v]);
    }
  } else {
    F8 vectors[kVectors];
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) vectors[v] = load_vector(v);
    FT_UNROLLED for (int r = 0; r < kRows; ++r) {
      const F8 weight = broadcast(weight_of(r));
      FT_UNROLLED for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = fma(weight, vectors[v], sums[r][v]);
      }
    }
  }
}

// Where keys are read from. Of a chunk, dimension d is at `chunk(c) + d * stride()`.
struct PackedKeys {
  static constexpr bool kFetchAhead = false;
  const float* packed;  // one chunk

  const float* chunk(int) const { return packed; }
  const float* ahead(int) const { return nullptr; }
  int64_t stride() const { return kChunkKeys; }
};

template <class Element>
struct CachedKeys {
  static constexpr bool kFetchAhead = true;
  const Element* const* chunks;  // of the tile's first KV head; kChunksAhead more than are asked for
  int64_t block_size;
  int64_t offset;  // of the KV head

  const Element* chunk(int c) const { return chunks[c] + offset; }
  const Element* ahead(int c) const { return chunks[c + kChunksAhead] + offset; }
  int64_t stride() const { return block_size; }
};

// Scores of kRows rows against kChunks neighbouring chunks. Of the queries, interleaved, dimension
// d is at q_DX + d * kRows; the next row's scores are at kPartitionKeys.
template <int kRows, int kChunks, class Keys>
void score_chunks(const float* q_DX, int64_t head_dim, const Keys& keys, float* scores) {
  constexpr int kVectors = 2 * kChunks;
  F8 sums[kRows][kVectors];
  FT_UNROLLED for (int r = 0; r < kRows; ++r) {
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) sums[r][v] = broadcast(0.0f);
  }
  decltype(keys.chunk(0)) chunks[kChunks], ahead[kChunks];
  FT_UNROLLED for (int c = 0; c < kChunks; ++c) {
    chunks[c] = keys.chunk(c);
    ahead[c] = keys.ahead(c);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    add_products(
        sums, [&](int v) { return load_elements(chunks[v / 2] + v % 2 * kLanes); },
        [&](int r) { return q_DX[r]; });
    q_DX += kRows;
    FT_UNROLLED for (int c = 0; c < kChunks; ++c) {
      chunks[c] += keys.stride();
      if constexpr (Keys::kFetchAhead) {
        fetch(ahead[c]);
        ahead[c] += keys.stride();
      }
    }
  }
  FT_UNROLLED for (int r = 0; r < kRows; ++r) {
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) {
      store(scores + r * kPartitionKeys + v * kLanes, sums[r][v]);
    }
  }
}

// 2^a for a <= 0, to 2e-7 of it; 0 below -127, and NaN stays. The polynomial of degree 5 for the
// fraction has the least greatest relative error.
inline F8 exp2_of_negative(F8 a) {
  a = max(broadcast(-127.0f), a);  // of two operands a NaN wins as the second
  const I8 whole = round_to_int(a);
  const F8 x = a - to_float(whole);
  F8 y = broadcast(1.326472731307149e-3f);
  y = fma(y, x, broadcast(9.671512991189957e-3f));
  y = fma(y, x, broadcast(5.550733581185341e-2f));
  y = fma(y, x, broadcast(2.4022242426872253e-1f));
  y = fma(y, x, broadcast(6.931470036506653e-1f));
  y = fma(y, x, broadcast(1.0f));
  const I8 power_bits = (whole + 127) << 23;  // of 2^-127: zero
  F8 power;
  std::memcpy(&power, &power_bits, sizeof power);
  return y * power;
}

struct Normaliser {
  float largest;  // score
  float total;    // of the weights
};

// Turns the scores of keys [begin, end) into weights, 2^(score - largest). Those beside them, up
// to whole vectors, become 0.
inline Normaliser weigh_scores(float* scores, int64_t begin, int64_t end) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const int64_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
  for (int64_t key = first; key < begin; ++key) scores[key] = kNothing;
  for (int64_t key = end; key < last; ++key) scores[key] = kNothing;
  F8 largest_of_lanes = broadcast(kNothing);
  for (int64_t key = first; key < last; key += kLanes) {
    largest_of_lanes = max(largest_of_lanes, load(scores + key));
  }
  const float largest = firsttoken::largest(largest_of_lanes);
  F8 totals = broadcast(0.0f);
  for (int64_t key = first; key < last; key += kLanes) {
    const F8 weights = exp2_of_negative(load(scores + key) - largest);
    store(scores + key, weights);
    totals += weights;
  }
  return {largest, sum(totals)};
}

// Where values are read from: `row(key)` is a key's first number of the columns asked for, and up
// to `run_end(key)` the keys' rows are `stride()` apart.
struct PackedValues {
  static constexpr bool kFetchAhead = false;
  const float* panel;  // [kPartitionKeys, kPanelColumns]

  const float* row(int64_t key) const { return panel + key * kPanelColumns; }
  const float* ahead(int64_t) const { return nullptr; }
  int64_t run_end(int64_t) const { return kPartitionKeys; }
  int64_t stride() const { return kPanelColumns; }
  PackedValues from(int64_t column) const { return {panel + column}; }
};

template <class Element>
struct CachedValues {
  static constexpr bool kFetchAhead = true;
  const Element* const* chunks;  // the first row of each, and kChunksAhead more
  int64_t head_dim;
  int64_t column;  // and where the KV head begins

  const Element* row(int64_t key) const { return row_of(key / kChunkKeys, key); }
  const Element* ahead(int64_t key) const { return row_of(key / kChunkKeys + kChunksAhead, key); }
  int64_t run_end(int64_t key) const { return (key / kChunkKeys + 1) * kChunkKeys; }
  int64_t stride() const { return head_dim; }
  CachedValues from(int64_t further) const { return {chunks, head_dim, column + further}; }

  const Element* row_of(int64_t chunk, int64_t key) const {
    return chunks[chunk] + key % kChunkKeys * head_dim + column;
  }
};

// Adds the values of keys [begin, end), weighted, to kVectors vectors of each row's sums. The next
// row's weights are at kPartitionKeys, its sums at sums_stride.
template <int kRows, int kVectors, class Values>
void add_weighted(const float* weights, const Values& values, int64_t begin, int64_t end,
                  float* sums, int64_t sums_stride) {
  F8 total[kRows][kVectors];
  FT_UNROLLED for (int r = 0; r < kRows; ++r) {
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) {
      total[r][v] = load(sums + r * sums_stride + v * kLanes);
    }
  }
  for (int64_t key = begin; key < end;) {
    const auto* row = values.row(key);
    const auto* ahead = values.ahead(key);
    const int64_t run_end = std::min(end, values.run_end(key));
    for (; key < run_end; ++key, row += values.stride()) {
      add_products(
          total, [&](int v) { return load_elements(row + v * kLanes); },
          [&](int r) { return weights[r * kPartitionKeys + key]; });
      if constexpr (Values::kFetchAhead) {
        constexpr int kVectorsOfLine = 64 / (kLanes * sizeof(*ahead));
        for (int v = 0; v < kVectors; v += kVectorsOfLine) fetch(ahead + v * kLanes);
        ahead += values.stride();
      }
    }
  }
  FT_UNROLLED for (int r = 0; r < kRows; ++r) {
    FT_UNROLLED for (int v = 0; v < kVectors; ++v) {
      store(sums + r * sums_stride + v * kLanes, total[r][v]);
    }
  }
}

}  // namespace firsttoken

#undef FT_UNROLLED
