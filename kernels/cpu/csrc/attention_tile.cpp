#include "attention_tile.h"

#include <algorithm>

#include "attention_cache.h"

namespace firsttoken {
namespace {

// Up to so many micro-tiles read the cache itself; more would convert each number too often.
constexpr int64_t kMicroTilesInPlace = 4;

constexpr float kLog2OfE = 1.4426950408889634f;

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t first_seen(const AttentionCall& call, int64_t position) {
  if (call.sliding_window == 0) return 0;
  return std::max<int64_t>(0, position - call.sliding_window + 1);
}

}  // namespace

Partitions partitions_of(const AttentionCall& call, const Tile& tile) {
  const int64_t last_position = tile.first_position + tile.num_tokens - 1;
  return {first_seen(call, tile.first_position) / kPartitionKeys,
          last_position / kPartitionKeys + 1};
}

int64_t Partial::size(const AttentionCall& call, int64_t num_tokens) {
  const int64_t num_rows = num_tokens * call.group();
  return rounded_up(2 * num_rows, kPanelColumns) +
         num_rows * rounded_up(call.shape.head_dim, kPanelColumns);
}

Partial::Partial(const AttentionCall& call, int64_t num_tokens, float* memory)
    : largest_X(memory),
      total_X(memory + num_tokens * call.group()),
      sums_XD(memory + rounded_up(2 * num_tokens * call.group(), kPanelColumns)) {}

void TileAttention::start(const AttentionCall& call, const Tile& tile) {
  call_ = &call;
  tile_ = &tile;
  const int64_t head_dim = call.shape.head_dim, group = call.group();
  const float scale = call.scale * kLog2OfE;
  num_rows_ = tile.num_tokens * group;
  num_micro_tiles_ = (num_rows_ + kMicroRows - 1) / kMicroRows;
  queries_.reserve(num_rows_ * head_dim);
  scores_.reserve(num_rows_ * kPartitionKeys);
  packed_keys_.reserve(head_dim * kChunkKeys);
  packed_values_.reserve(rounded_up(head_dim, kPanelColumns) * kPartitionKeys);
  for (int64_t m = 0; m < num_micro_tiles_; ++m) {
    const Span rows = micro_tile(m);
    float* queries_DX = queries_of(rows);
    for (int64_t row = rows.begin; row < rows.end; ++row, ++queries_DX) {
      const float* q = tile.q + row / group * call.q_stride + row % group * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) queries_DX[d * rows.count()] = q[d] * scale;
    }
  }
}

void TileAttention::attend(int64_t partition, const Partial& partial) {
  partition_start_ = partition * kPartitionKeys;
  find_seen();
  if (call_->cache.half) {
    attend_elements<Half>(partition, partial);
  } else {
    attend_elements<float>(partition, partial);
  }
}

template <class Element>
void TileAttention::attend_elements(int64_t partition, const Partial& partial) {
  const CachedPartition<Element> cached(call_->cache, call_->shape, tile_->kv_head,
                                        tile_->block_table, partition);
  const Span seen = seen_by_any({0, num_rows_}), chunks = seen.in_chunks();
  if (num_micro_tiles_ <= kMicroTilesInPlace && cached.can_be_read_in_place()) {
    ChunkStarts<Element> starts;
    const int64_t context_end = tile_->first_position + tile_->num_tokens - partition_start_;
    cached.find_chunks(chunks.begin, chunks.end, context_end, starts);
    score_in_place(starts.keys);
    weigh(partial);
    add_in_place(starts.values, partial.sums_XD);
  } else {
    for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      cached.fetch_ahead(chunk, chunks.end);
      cached.pack_keys(chunk, seen.begin, seen.end, packed_keys_.data());
      score_packed(chunk);
    }
    weigh(partial);
    cached.pack_values(seen.begin, seen.end, packed_values_.data());
    add_packed(partial.sums_XD);
  }
}

void TileAttention::find_seen() {
  const auto in_partition = [&](int64_t position) {
    return std::clamp<int64_t>(position - partition_start_, 0, kPartitionKeys);
  };
  seen_X_.clear();
  for (int64_t token = 0; token < tile_->num_tokens; ++token) {
    const int64_t position = tile_->first_position + token;
    const Span seen{in_partition(first_seen(*call_, position)), in_partition(position + 1)};
    seen_X_.insert(seen_X_.end(), static_cast<size_t>(call_->group()), seen);
  }
}

TileAttention::Span TileAttention::seen_by_any(Span rows) const {
  return {seen_X_[rows.begin].begin, seen_X_[rows.end - 1].end};
}

// Rows are divided among the micro-tiles as evenly as can be.
TileAttention::Span TileAttention::micro_tile(int64_t index) const {
  return {index * num_rows_ / num_micro_tiles_, (index + 1) * num_rows_ / num_micro_tiles_};
}

float* TileAttention::queries_of(Span rows) const {
  return queries_.data() + rows.begin * call_->shape.head_dim;
}

int64_t TileAttention::sums_stride() const {
  return rounded_up(call_->shape.head_dim, kPanelColumns);
}

template <class Element>
void TileAttention::score_in_place(const Element* const* chunks) {
  const int64_t head_dim = call_->shape.head_dim;
  for (int64_t m = 0; m < num_micro_tiles_; ++m) {
    const Span rows = micro_tile(m), seen = seen_by_any(rows).in_chunks();
    with_rows(rows.count(), [&](auto count) {
      constexpr int kRows = count, kChunks = kRows <= 3 ? 2 : 1;
      int64_t chunk = seen.begin;
      const auto score = [&](auto chunks_at_once) {
        const CachedKeys<Element> keys{chunks + chunk, call_->cache.block_size};
        score_chunks<kRows, chunks_at_once>(queries_of(rows), head_dim, keys,
                                            scores_of(rows.begin) + chunk * kChunkKeys);
        chunk += chunks_at_once;
      };
      while (chunk + kChunks <= seen.end) score(std::integral_constant<int, kChunks>());
      while (chunk < seen.end) score(std::integral_constant<int, 1>());
    });
  }
}

void TileAttention::score_packed(int64_t chunk) {
  for (int64_t m = 0; m < num_micro_tiles_; ++m) {
    const Span rows = micro_tile(m), seen = seen_by_any(rows).in_chunks();
    if (chunk < seen.begin || chunk >= seen.end) continue;
    with_rows(rows.count(), [&](auto count) {
      score_chunks<count, 1>(queries_of(rows), call_->shape.head_dim,
                             PackedKeys{packed_keys_.data()},
                             scores_of(rows.begin) + chunk * kChunkKeys);
    });
  }
}

// Also clears the sums that the values are to be added to.
void TileAttention::weigh(const Partial& partial) {
  for (int64_t row = 0; row < num_rows_; ++row) {
    const Span seen = seen_X_[row];
    if (seen.begin >= seen.end) continue;
    const Normaliser normaliser = weigh_scores(scores_of(row), seen.begin, seen.end);
    partial.largest_X[row] = normaliser.largest;
    partial.total_X[row] = normaliser.total;
    std::fill_n(partial.sums_XD + row * sums_stride(), sums_stride(), 0.0f);
  }
}

template <class Element>
void TileAttention::add_in_place(const Element* const* chunks, float* sums) {
  constexpr int kMost = 4;
  const int64_t head_dim = call_->shape.head_dim;
  for (int64_t m = 0; m < num_micro_tiles_; ++m) {
    int64_t column = 0;
    const auto add = [&](auto vectors) {
      const CachedValues<Element> values{chunks, head_dim, column};
      add_columns<vectors>(micro_tile(m), values, sums + column);
      column += vectors * kLanes;
    };
    while (column + kMost * kLanes <= head_dim) add(std::integral_constant<int, kMost>());
    while (column < head_dim) add(std::integral_constant<int, 1>());
  }
}

void TileAttention::add_packed(float* sums) {
  for (int64_t column = 0; column < call_->shape.head_dim; column += kPanelColumns) {
    const PackedValues panel{packed_values_.data() + column * kPartitionKeys};
    for (int64_t m = 0; m < num_micro_tiles_; ++m) {
      add_columns<kPanelColumns / kLanes>(micro_tile(m), panel, sums + column);
    }
  }
}

// The keys that all rows see are added for all of them at once, the few before and after them row
// by row: a value that a row does not see must not even be multiplied by 0, it may be anything.
template <int kVectors, class Values>
void TileAttention::add_columns(Span rows, const Values& values, float* sums) {
  const int64_t all_begin = seen_X_[rows.end - 1].begin;
  const int64_t all_end = std::max(all_begin, seen_X_[rows.begin].end);
  const auto add_one = [&](int64_t row, int64_t begin, int64_t end) {
    if (begin >= end) return;
    add_weighted<1, kVectors>(scores_of(row), values, begin, end, sums + row * sums_stride(),
                              sums_stride());
  };
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    add_one(row, seen_X_[row].begin, std::min(seen_X_[row].end, all_begin));
  }
  if (all_begin < all_end) {
    with_rows(rows.count(), [&](auto count) {
      constexpr int kAtOnce = count <= 3 ? kVectors : std::min(kVectors, 2);
      for (int v = 0; v < kVectors; v += kAtOnce) {
        add_weighted<count, kAtOnce>(scores_of(rows.begin), values.from(v * kLanes), all_begin,
                                     all_end, sums + rows.begin * sums_stride() + v * kLanes,
                                     sums_stride());
      }
    });
  }
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    add_one(row, std::max(seen_X_[row].begin, all_end), seen_X_[row].end);
  }
}

void merge(const AttentionCall& call, const Tile& tile, int64_t partition, const Partial& partial,
           const Partial& merged) {
  const int64_t stride = rounded_up(call.shape.head_dim, kPanelColumns);
  for (int64_t row = 0; row < tile.num_tokens * call.group(); ++row) {
    const int64_t position = tile.first_position + row / call.group();
    const int64_t first = first_seen(call, position) / kPartitionKeys;
    if (partition < first || partition > position / kPartitionKeys) continue;
    const float* from = partial.sums_XD + row * stride;
    float* into = merged.sums_XD + row * stride;
    float& largest = merged.largest_X[row];
    float& total = merged.total_X[row];
    if (partition == first) {
      largest = partial.largest_X[row];
      total = partial.total_X[row];
      std::copy_n(from, stride, into);
      continue;
    }
    const float new_largest = std::max(largest, partial.largest_X[row]);
    const F8 old_share = exp2_of_negative(broadcast(largest - new_largest));
    const F8 new_share = exp2_of_negative(broadcast(partial.largest_X[row] - new_largest));
    largest = new_largest;
    total = total * old_share[0] + partial.total_X[row] * new_share[0];
    for (int64_t d = 0; d < stride; d += kLanes) {
      store(into + d, fma(load(from + d), new_share, load(into + d) * old_share));
    }
  }
}

void write_out(const AttentionCall& call, const Tile& tile, const Partial& merged) {
  const int64_t head_dim = call.shape.head_dim, group = call.group();
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    float* out = tile.out + row / group * call.out_stride + row % group * head_dim;
    const float* sums = merged.sums_XD + row * rounded_up(head_dim, kPanelColumns);
    const float share = 1.0f / merged.total_X[row];
    for (int64_t d = 0; d < head_dim; ++d) out[d] = sums[d] * share;
  }
}

}  // namespace firsttoken
