// How the attention of a step is divided among threads. What is computed never depends on it.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_tile.h"
#include "batch.h"
#include "buffer.h"

namespace firsttoken {

// All partitions of a tile, or some of them where the tile is divided among threads.
struct AttentionItem {
  int64_t tile;
  Partitions partitions;
  bool divided;
  int64_t partials;  // of a divided tile: where its results for these partitions go, in floats
};

// Keeps its memory from call to call.
class AttentionPlan {
 public:
  // Valid until the next call; reads q and writes to out.
  void make(const AttentionCall& call, const Batch& batch, const float* q, float* out,
            int num_threads);

  const Tile& tile_of(const AttentionItem& item) const { return tiles_[item.tile]; }

  // Neighbouring items that a thread takes together.
  int64_t num_bundles() const { return static_cast<int64_t>(bundle_starts_.size()) - 1; }
  const AttentionItem* bundle_begin(int64_t bundle) const {
    return items_.data() + bundle_starts_[bundle];
  }

  // Divided tiles, with all of their partitions; to be merged when all items are done.
  const std::vector<AttentionItem>& divided_tiles() const { return divided_tiles_; }

  // Of a divided tile's item.
  Partial partial(const AttentionCall& call, const AttentionItem& item, int64_t partition) const;

 private:
  void add_tiles(const AttentionCall& call, const Batch& batch, const float* q, float* out,
                 int num_threads);
  void add_items(const AttentionCall& call, int num_threads);
  void bundle_items(const AttentionCall& call, int num_threads);

  std::vector<Tile> tiles_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> divided_tiles_;
  std::vector<int64_t> bundle_starts_;
  FloatBuffer partials_;
};

}  // namespace firsttoken
