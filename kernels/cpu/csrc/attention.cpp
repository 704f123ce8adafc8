#include "attention.h"

#include "attention_plan.h"
#include "attention_tile.h"
#include "buffer.h"

namespace firsttoken {
namespace {

// A thread's memory for the tile that it is at.
struct Worker {
  TileAttention attention;
  FloatBuffer merged;
  FloatBuffer partial;
};

// Into the plan's memory: another thread may be at the same tile.
void attend_part(const AttentionCall& call, const AttentionPlan& plan, const AttentionItem& item,
                 Worker& worker) {
  worker.attention.start(call, plan.tile_of(item));
  for (int64_t p = item.partitions.begin; p < item.partitions.end; ++p) {
    worker.attention.attend(p, plan.partial(call, item, p));
  }
}

void attend_whole(const AttentionCall& call, const Tile& tile, Partitions partitions,
                  Worker& worker) {
  const int64_t size = Partial::size(call, tile);
  const Partial merged(call, tile, worker.merged.reserve(size));
  const Partial partial(call, tile, worker.partial.reserve(size));
  worker.attention.start(call, tile);
  // The first partition that the tile sees is the first of every row that sees it.
  worker.attention.attend(partitions.begin, merged);
  for (int64_t p = partitions.begin + 1; p < partitions.end; ++p) {
    worker.attention.attend(p, partial);
    merge(call, tile, p, partial, merged);
  }
  write_out(call, tile, merged);
}

void merge_parts(const AttentionCall& call, const AttentionPlan& plan, const AttentionItem& all) {
  const Tile& tile = plan.tile_of(all);
  const Partial merged = plan.partial(call, all, all.partitions.begin);
  for (int64_t p = all.partitions.begin + 1; p < all.partitions.end; ++p) {
    merge(call, tile, p, plan.partial(call, all, p), merged);
  }
  write_out(call, tile, merged);
}

}  // namespace

void paged_attention(ThreadPool& pool, const Batch& batch, const HeadShape& shape,
                     const KVLayer& cache, float scale, int64_t sliding_window, const float* q,
                     int64_t q_stride, float* out, int64_t out_stride) {
  static thread_local AttentionPlan own_plan;
  AttentionPlan& plan = own_plan;  // of this thread, also where others compute
  const AttentionCall call{shape, cache, scale, sliding_window, q_stride, out_stride};
  plan.make(call, batch, q, out, pool.num_threads());
  pool.for_each(plan.num_bundles(), [&](int64_t bundle, int) {
    static thread_local Worker worker;
    const AttentionItem* const end = plan.bundle_begin(bundle + 1);
    for (const AttentionItem* item = plan.bundle_begin(bundle); item != end; ++item) {
      if (item->divided) {
        attend_part(call, plan, *item, worker);
      } else {
        attend_whole(call, plan.tile_of(*item), item->partitions, worker);
      }
    }
  });
  const auto& divided_tiles = plan.divided_tiles();
  pool.for_each(static_cast<int64_t>(divided_tiles.size()),
                [&](int64_t i, int) { merge_parts(call, plan, divided_tiles[i]); });
}

}  // namespace firsttoken

extern "C" {

// Rows of q and out are [N, D], so many floats apart as their strides say.
void ft_paged_attention(const float* q, int64_t q_stride, float* out, int64_t out_stride,
                        const int32_t* query_start_loc_R1, const int32_t* seq_lens_R,
                        const int32_t* block_table_RM, int64_t num_tokens, int64_t num_requests,
                        int64_t blocks_per_row, int64_t num_heads, int64_t num_kv_heads,
                        int64_t head_dim, void* keys, void* values, int half, int64_t block_size,
                        float scale, int64_t sliding_window) {
  using namespace firsttoken;
  const Batch batch{num_tokens, num_requests, nullptr, nullptr, query_start_loc_R1, seq_lens_R,
                    block_table_RM, blocks_per_row};
  const HeadShape shape{num_heads, num_kv_heads, head_dim};
  const KVLayer cache{keys, values, half != 0, block_size};
  PoolLease pool;
  paged_attention(*pool, batch, shape, cache, scale, sliding_window, q, q_stride, out, out_stride);
}
}
