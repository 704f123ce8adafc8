// Attention of one tile of queries, partition by partition of its context.
//
//     context      |  partition 0  |  partition 1  |  partition 2  |     256 keys each, from
//     query p      |     seen      |  seen   p     |               |     position 0 on
//     with window  |         |<- window ->|        |               |
//
// Of each partition a row has a partial result: its largest score, the total of its weights and
// the weighted sum of the values. Partials are always merged in ascending order, so it does not
// matter which thread computed which, nor what else was in the step.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_cache.h"
#include "attention_kernels.h"
#include "batch.h"
#include "buffer.h"

namespace firsttoken {

// What all tiles of a call share.
struct AttentionCall {
  HeadShape shape;
  KVLayer cache;
  float scale;
  int64_t sliding_window;  // tokens; 0 for none
  int64_t q_stride;        // from token to token
  int64_t out_stride;

  int64_t group() const { return shape.num_heads / shape.num_kv_heads; }
};

// Neighbouring queries of a request with all the query heads of some KV heads; these are the tile's
// rows X, in the order KV head, token, head.
struct Tile {
  const float* q;  // of the first row
  float* out;
  int64_t num_tokens;
  int64_t first_position;  // of the first token
  int64_t first_kv_head;
  int64_t num_kv_heads;
  const int32_t* block_table;

  int64_t rows_of_head(const AttentionCall& call) const { return num_tokens * call.group(); }
  int64_t num_rows(const AttentionCall& call) const { return num_kv_heads * rows_of_head(call); }

  int64_t token(const AttentionCall& call, int64_t row) const {
    return row / call.group() % num_tokens;
  }
  int64_t position(const AttentionCall& call, int64_t row) const {
    return first_position + token(call, row);
  }
  // Where a row's query, or what becomes of it, lies behind the first one's.
  int64_t offset(const AttentionCall& call, int64_t row, int64_t stride) const {
    const int64_t head = row / rows_of_head(call) * call.group() + row % call.group();
    return token(call, row) * stride + head * call.shape.head_dim;
  }
};

// Whether so many queries of a request read the cache as it lies; only then may a tile have more
// than one KV head. More would convert each number too often, and have it packed instead.
bool reads_in_place(const AttentionCall& call, int64_t num_tokens);

// The partitions that a tile sees anything of: [begin, end).
struct Partitions {
  int64_t begin;
  int64_t end;

  int64_t count() const { return end - begin; }
};
Partitions partitions_of(const AttentionCall& call, const Tile& tile);

// Partial results of a tile's rows for one partition, in memory of the caller.
struct Partial {
  float* largest_X;
  float* total_X;
  float* sums_XD;  // columns filled up to whole panels

  static int64_t size(const AttentionCall& call, const Tile& tile);  // floats
  Partial(const AttentionCall& call, const Tile& tile, float* memory);
};

// Computes tiles, one after the other. Holds memory for it: one for each thread.
class TileAttention {
 public:
  // The tile and the call must stay until the next `start`.
  void start(const AttentionCall& call, const Tile& tile);

  // Rows that see nothing of the partition are left as they are.
  void attend(int64_t partition, const Partial& partial);

 private:
  struct Span {
    int64_t begin;
    int64_t end;

    int count() const { return static_cast<int>(end - begin); }
    Span within(Span other) const {
      return {std::max(begin, other.begin), std::min(end, other.end)};
    }
    Span in_chunks() const {
      return {begin / kChunkKeys, (end + kChunkKeys - 1) / kChunkKeys};
    }
  };

  void find_seen();
  Span seen_by_any(Span rows) const;
  Span micro_tile(int64_t head, int64_t index) const;  // rows
  float* queries_of(Span rows) const;
  float* scores_of(int64_t row) const { return scores_.data() + row * kPartitionKeys; }
  int64_t sums_stride() const;

  template <class Element>
  void attend_elements(int64_t partition, const Partial& partial);
  template <class Element>
  void attend_in_place(const CachedPartition<Element>& cached, const Partial& partial);
  template <class Element>
  void attend_packed(const CachedPartition<Element>& cached, const Partial& partial);
  template <class Element>
  void score_in_place(Span chunks, Span rows, const Element* const* starts, int64_t head_offset);
  void score_packed(int64_t chunk);
  void weigh(const Partial& partial);
  template <class Element>
  void add_in_place(Span keys, Span rows, const Element* const* starts, int64_t head_offset,
                    float* sums);
  void add_packed(Span keys, float* sums);
  template <int kVectors, class Values>
  void add_columns(Span keys, Span rows, const Values& values, float* sums);

  const AttentionCall* call_ = nullptr;
  const Tile* tile_ = nullptr;
  int64_t num_rows_ = 0;
  int64_t rows_of_head_ = 0;
  int64_t micro_tiles_of_head_ = 0;
  int64_t partition_start_ = 0;  // position
  // Which keys of the partition each row sees. Neither begin nor end falls from row to row of a
  // head; where they are empty they may lie anywhere.
  std::vector<Span> seen_X_;
  FloatBuffer queries_;  // scaled; of each micro-tile [head_dim, rows]
  FloatBuffer scores_;   // [X, kPartitionKeys]; then the weights
  FloatBuffer packed_keys_;  // of one chunk
  FloatBuffer packed_values_;
};

// Merges the partial results of a partition into those of all before it.
void merge(const AttentionCall& call, const Tile& tile, int64_t partition, const Partial& partial,
           const Partial& merged);

void write_out(const AttentionCall& call, const Tile& tile, const Partial& merged);

}  // namespace firsttoken
