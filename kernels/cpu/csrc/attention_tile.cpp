#include "attention_tile.h"

#include <algorithm>

#include "attention_cache.h"

namespace firsttoken {
namespace {

constexpr int64_t kMicroTilesInPlace = 4;  // of a KV head, at most

// Neighbouring chunks of one KV head that are read before the next head's: few, so that memory
// sees blocks as they lie, all heads of one after those of another.
constexpr int64_t kScoredAtOnce = 2, kAddedAtOnce = 4;

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

bool reads_in_place(const AttentionCall& call, int64_t num_tokens) {
  const bool chunks_are_whole = call.cache.block_size % kChunkKeys == 0;
  return chunks_are_whole && call.shape.head_dim % kLanes == 0 &&
         num_tokens * call.group() <= kMicroTilesInPlace * kMicroRows;
}

int64_t Partial::size(const AttentionCall& call, const Tile& tile) {
  const int64_t num_rows = tile.num_rows(call);
  return rounded_up(2 * num_rows, kPanelColumns) +
         num_rows * rounded_up(call.shape.head_dim, kPanelColumns);
}

Partial::Partial(const AttentionCall& call, const Tile& tile, float* memory)
    : largest_X(memory),
      total_X(memory + tile.num_rows(call)),
      sums_XD(memory + rounded_up(2 * tile.num_rows(call), kPanelColumns)) {}

void TileAttention::start(const AttentionCall& call, const Tile& tile) {
  call_ = &call;
  tile_ = &tile;
  const int64_t head_dim = call.shape.head_dim;
  const float scale = call.scale * kLog2OfE;
  num_rows_ = tile.num_rows(call);
  rows_of_head_ = tile.rows_of_head(call);
  micro_tiles_of_head_ = (rows_of_head_ + kMicroRows - 1) / kMicroRows;
  queries_.reserve(num_rows_ * head_dim);
  scores_.reserve(num_rows_ * kPartitionKeys);
  packed_keys_.reserve(head_dim * kChunkKeys);
  packed_values_.reserve(rounded_up(head_dim, kPanelColumns) * kPartitionKeys);
  for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
    for (int64_t m = 0; m < micro_tiles_of_head_; ++m) {
      const Span rows = micro_tile(head, m);
      float* queries_DX = queries_of(rows);
      for (int64_t row = rows.begin; row < rows.end; ++row, ++queries_DX) {
        const float* q = tile.q + tile.offset(call, row, call.q_stride);
        for (int64_t d = 0; d < head_dim; ++d) queries_DX[d * rows.count()] = q[d] * scale;
      }
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
  const CachedPartition<Element> cached(call_->cache, call_->shape, tile_->first_kv_head,
                                        tile_->block_table, partition);
  if (reads_in_place(*call_, tile_->num_tokens)) {
    attend_in_place(cached, partial);
  } else {
    attend_packed(cached, partial);
  }
}

// Block by block, so that what lies together is read together.
template <class Element>
void TileAttention::attend_in_place(const CachedPartition<Element>& cached,
                                    const Partial& partial) {
  const Span seen = seen_by_any({0, rows_of_head_}), chunks = seen.in_chunks();
  const int64_t context_end = tile_->first_position + tile_->num_tokens - partition_start_;
  ChunkStarts<Element> starts;
  cached.find_chunks(chunks.begin, chunks.end, context_end, starts);
  const auto for_each_micro_tile = [&](const auto& work) {
    for (int64_t head = 0; head < tile_->num_kv_heads; ++head) {
      for (int64_t m = 0; m < micro_tiles_of_head_; ++m) {
        work(micro_tile(head, m), head * cached.head_stride());
      }
    }
  };
  for (int64_t chunk = chunks.begin; chunk < chunks.end; chunk += kScoredAtOnce) {
    for_each_micro_tile([&](Span rows, int64_t head_offset) {
      score_in_place({chunk, chunk + kScoredAtOnce}, rows, starts.keys, head_offset);
    });
  }
  weigh(partial);
  for (int64_t chunk = chunks.begin; chunk < chunks.end; chunk += kAddedAtOnce) {
    const Span keys{chunk * kChunkKeys, (chunk + kAddedAtOnce) * kChunkKeys};
    for_each_micro_tile([&](Span rows, int64_t head_offset) {
      add_in_place(keys, rows, starts.values, head_offset, partial.sums_XD);
    });
  }
}

template <class Element>
void TileAttention::attend_packed(const CachedPartition<Element>& cached, const Partial& partial) {
  const Span seen = seen_by_any({0, num_rows_}), chunks = seen.in_chunks();
  for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    cached.fetch_ahead(chunk, chunks.end);
    cached.pack_keys(chunk, seen.begin, seen.end, packed_keys_.data());
    score_packed(chunk);
  }
  weigh(partial);
  cached.pack_values(seen.begin, seen.end, packed_values_.data());
  add_packed(seen, partial.sums_XD);
}

void TileAttention::find_seen() {
  const auto in_partition = [&](int64_t position) {
    return std::clamp<int64_t>(position - partition_start_, 0, kPartitionKeys);
  };
  seen_X_.clear();
  for (int64_t row = 0; row < num_rows_; ++row) {
    const int64_t position = tile_->position(*call_, row);
    seen_X_.push_back({in_partition(first_seen(*call_, position)), in_partition(position + 1)});
  }
}

TileAttention::Span TileAttention::seen_by_any(Span rows) const {
  return {seen_X_[rows.begin].begin, seen_X_[rows.end - 1].end};
}

// A head's rows are divided among its micro-tiles as evenly as can be.
TileAttention::Span TileAttention::micro_tile(int64_t head, int64_t index) const {
  const int64_t first = head * rows_of_head_;
  return {first + index * rows_of_head_ / micro_tiles_of_head_,
          first + (index + 1) * rows_of_head_ / micro_tiles_of_head_};
}

float* TileAttention::queries_of(Span rows) const {
  return queries_.data() + rows.begin * call_->shape.head_dim;
}

int64_t TileAttention::sums_stride() const {
  return rounded_up(call_->shape.head_dim, kPanelColumns);
}

template <class Element>
void TileAttention::score_in_place(Span chunks, Span rows, const Element* const* starts,
                                   int64_t head_offset) {
  const Span seen = chunks.within(seen_by_any(rows).in_chunks());
  with_rows(rows.count(), [&](auto count) {
    constexpr int kRows = count, kChunks = kRows <= 3 ? kScoredAtOnce : 1;
    int64_t chunk = seen.begin;
    const auto score = [&](auto chunks_at_once) {
      const CachedKeys<Element> keys{starts + chunk, call_->cache.block_size, head_offset};
      score_chunks<kRows, chunks_at_once>(queries_of(rows), call_->shape.head_dim, keys,
                                          scores_of(rows.begin) + chunk * kChunkKeys);
      chunk += chunks_at_once;
    };
    while (chunk + kChunks <= seen.end) score(std::integral_constant<int, kChunks>());
    while (chunk < seen.end) score(std::integral_constant<int, 1>());
  });
}

void TileAttention::score_packed(int64_t chunk) {
  for (int64_t m = 0; m < micro_tiles_of_head_; ++m) {
    const Span rows = micro_tile(0, m), seen = seen_by_any(rows).in_chunks();
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
void TileAttention::add_in_place(Span keys, Span rows, const Element* const* starts,
                                 int64_t head_offset, float* sums) {
  constexpr int kMost = 4;
  const int64_t head_dim = call_->shape.head_dim;
  int64_t column = 0;
  const auto add = [&](auto vectors) {
    const CachedValues<Element> values{starts, head_dim, head_offset + column};
    add_columns<vectors>(keys, rows, values, sums + column);
    column += vectors * kLanes;
  };
  while (column + kMost * kLanes <= head_dim) add(std::integral_constant<int, kMost>());
  while (column < head_dim) add(std::integral_constant<int, 1>());
}

void TileAttention::add_packed(Span keys, float* sums) {
  for (int64_t column = 0; column < call_->shape.head_dim; column += kPanelColumns) {
    const PackedValues panel{packed_values_.data() + column * kPartitionKeys};
    for (int64_t m = 0; m < micro_tiles_of_head_; ++m) {
      add_columns<kPanelColumns / kLanes>(keys, micro_tile(0, m), panel, sums + column);
    }
  }
}

// The keys that all rows see are added for all of them at once, the few before and after them row
// by row: a value that a row does not see must not even be multiplied by 0, it may be anything.
template <int kVectors, class Values>
void TileAttention::add_columns(Span keys, Span rows, const Values& values, float* sums) {
  const Span last_row = seen_X_[rows.end - 1].within(keys);
  const int64_t all_begin = last_row.begin;
  const int64_t all_end = std::max(all_begin, seen_X_[rows.begin].within(keys).end);
  const auto add_one = [&](int64_t row, int64_t begin, int64_t end) {
    if (begin >= end) return;
    add_weighted<1, kVectors>(scores_of(row), values, begin, end, sums + row * sums_stride(),
                              sums_stride());
  };
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const Span seen = seen_X_[row].within(keys);
    add_one(row, seen.begin, std::min(seen.end, all_begin));
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
    const Span seen = seen_X_[row].within(keys);
    add_one(row, std::max(seen.begin, all_end), seen.end);
  }
}

void merge(const AttentionCall& call, const Tile& tile, int64_t partition, const Partial& partial,
           const Partial& merged) {
  const int64_t stride = rounded_up(call.shape.head_dim, kPanelColumns);
  for (int64_t row = 0; row < tile.num_rows(call); ++row) {
    const int64_t position = tile.position(call, row);
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
  const int64_t head_dim = call.shape.head_dim;
  for (int64_t row = 0; row < tile.num_rows(call); ++row) {
    float* out = tile.out + tile.offset(call, row, call.out_stride);
    const float* sums = merged.sums_XD + row * rounded_up(head_dim, kPanelColumns);
    const float share = 1.0f / merged.total_X[row];
    for (int64_t d = 0; d < head_dim; ++d) out[d] = sums[d] * share;
  }
}

}  // namespace firsttoken
