#include "attention_plan.h"

#include <algorithm>

namespace firsttoken {
namespace {

constexpr int64_t kMaxRows = 96;  // of a tile: its queries and a chunk's keys fit the L1 cache
constexpr int kRequestsOfThread = 4;  // enough that threads end at about the same time

// In units of one row against one key. To read a key takes as long as some rows' arithmetic.
int64_t cost_of(const AttentionCall& call, const Tile& tile, Partitions partitions) {
  constexpr int64_t kReading = 6;
  const int64_t context = tile.first_position + tile.num_tokens;
  const int64_t end = std::min(partitions.end * kPartitionKeys, context);
  const int64_t num_keys = end - partitions.begin * kPartitionKeys;
  return num_keys * tile.num_kv_heads * (tile.rows_of_head(call) + kReading);
}

}  // namespace

void AttentionPlan::make(const AttentionCall& call, const Batch& batch, const float* q, float* out,
                         int num_threads) {
  tiles_.clear();
  items_.clear();
  divided_tiles_.clear();
  add_tiles(call, batch, q, out, num_threads);
  add_items(call, num_threads);
  bundle_items(call, num_threads);
}

// Where there are enough requests for all threads, a few queries have one tile for all KV heads.
void AttentionPlan::add_tiles(const AttentionCall& call, const Batch& batch, const float* q,
                              float* out, int num_threads) {
  const int64_t group = call.group(), num_kv_heads = call.shape.num_kv_heads;
  const int64_t tokens_at_once = std::max<int64_t>(1, kMaxRows / group);
  const bool enough_requests = batch.num_requests >= kRequestsOfThread * num_threads;
  for (int64_t r = 0; r < batch.num_requests; ++r) {
    const int64_t begin = batch.query_start_loc_R1[r], end = batch.query_start_loc_R1[r + 1];
    const int64_t first_position = batch.seq_lens_R[r] - (end - begin);
    const int32_t* block_table = batch.block_table_RM + r * batch.blocks_per_row;
    for (int64_t token = begin; token < end; token += tokens_at_once) {
      const int64_t num_tokens = std::min(tokens_at_once, end - token);
      const bool all_heads = enough_requests && reads_in_place(call, num_tokens);
      const int64_t heads_at_once = all_heads ? num_kv_heads : 1;
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head += heads_at_once) {
        const int64_t first_head = kv_head * group * call.shape.head_dim;
        tiles_.push_back({q + token * call.q_stride + first_head,
                          out + token * call.out_stride + first_head, num_tokens,
                          first_position + token - begin, kv_head, heads_at_once, block_table});
      }
    }
  }
}

// A tile that would keep one thread busy long after the others is divided.
void AttentionPlan::add_items(const AttentionCall& call, int num_threads) {
  int64_t total_cost = 0;
  for (const Tile& tile : tiles_) total_cost += cost_of(call, tile, partitions_of(call, tile));
  const int64_t most = num_threads == 1 ? total_cost : total_cost / (4 * num_threads);
  int64_t partials_size = 0;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    const Tile& tile = tiles_[t];
    const Partitions all = partitions_of(call, tile);
    const int64_t at_once = std::max<int64_t>(1, most * all.count() / cost_of(call, tile, all));
    const bool divide = all.count() > at_once;
    const int64_t size = Partial::size(call, tile);
    const auto item = [&](Partitions partitions) {
      const int64_t partials = partials_size + (partitions.begin - all.begin) * size;
      return AttentionItem{static_cast<int64_t>(t), partitions, divide, partials};
    };
    for (int64_t p = all.begin; p < all.end; p += at_once) {
      items_.push_back(item({p, std::min(p + at_once, all.end)}));
    }
    if (divide) {
      divided_tiles_.push_back(item(all));
      partials_size += all.count() * size;
    }
  }
  partials_.reserve(partials_size);
}

// Large bundles first, then smaller and smaller ones, so that all threads end together.
void AttentionPlan::bundle_items(const AttentionCall& call, int num_threads) {
  int64_t left = 0;
  for (const AttentionItem& item : items_) left += cost_of(call, tile_of(item), item.partitions);
  const int64_t least = left / (16 * num_threads);
  bundle_starts_.assign(1, 0);
  int64_t bundle_cost = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    bundle_cost += cost_of(call, tile_of(items_[i]), items_[i].partitions);
    if (bundle_cost < std::max(least, left / (2 * num_threads)) && i + 1 < items_.size()) continue;
    bundle_starts_.push_back(static_cast<int64_t>(i) + 1);
    left -= bundle_cost;
    bundle_cost = 0;
  }
}

Partial AttentionPlan::partial(const AttentionCall& call, const AttentionItem& item,
                               int64_t partition) const {
  const Tile& tile = tile_of(item);
  const int64_t offset = (partition - item.partitions.begin) * Partial::size(call, tile);
  return Partial(call, tile, partials_.data() + item.partials + offset);
}

}  // namespace firsttoken
