// The keys and values of one partition of a request's context, of one KV head and those after it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_kernels.h"
#include "cache_view.h"

namespace firsttoken {

// Where a partition's chunks begin. After the last come those that are read next: values after
// keys, then the keys of the next partition.
template <class Element>
struct ChunkStarts {
  const Element* keys[kPartitionChunks + kChunksAhead];
  const Element* values[kPartitionChunks + kChunksAhead];
};

// Positions count from the partition's start.
template <class Element>
class CachedPartition {
 public:
  CachedPartition(const KVLayer& cache, const HeadShape& shape, int64_t kv_head,
                  const int32_t* block_table, int64_t partition)
      : cache_(cache), shape_(shape), kv_head_(kv_head), block_table_(block_table),
        start_(partition * kPartitionKeys) {}

  // From a KV head's first element in a block to the next head's.
  int64_t head_stride() const { return shape_.head_dim * cache_.block_size; }

  // Of chunks [first, end); `context_end` is where the tile's context ends.
  void find_chunks(int64_t first, int64_t end, int64_t context_end,
                   ChunkStarts<Element>& starts) const {
    for (int64_t chunk = first; chunk < end; ++chunk) {
      starts.keys[chunk] = key(chunk * kChunkKeys);
      starts.values[chunk] = value(chunk * kChunkKeys);
    }
    for (int64_t i = 0; i < kChunksAhead; ++i) {
      const int64_t next = kPartitionKeys + i * kChunkKeys;
      const Element* last_value = starts.values[end - 1];
      starts.keys[end + i] = first + i < end ? starts.values[first + i] : last_value;
      starts.values[end + i] = next < context_end ? key(next) : last_value;
    }
  }

  // Asks for the values of a chunk, and for the keys of the next: both are packed later.
  void fetch_ahead(int64_t chunk, int64_t end_chunk) const {
    if (!chunks_are_whole()) return;
    fetch_chunk(value(chunk * kChunkKeys));
    if (chunk + 1 < end_chunk) fetch_chunk(key((chunk + 1) * kChunkKeys));
  }

  // A chunk's keys as floats, [head_dim, kChunkKeys]; those outside [begin, end) may be left.
  void pack_keys(int64_t chunk, int64_t begin, int64_t end, float* packed) const {
    const int64_t first = chunk * kChunkKeys;
    if (chunks_are_whole()) {
      const Element* keys = key(first);
      for (int64_t d = 0; d < shape_.head_dim; ++d, keys += cache_.block_size) {
        store(packed + d * kChunkKeys, load_elements(keys));
        store(packed + d * kChunkKeys + kLanes, load_elements(keys + kLanes));
      }
      return;
    }
    for (int64_t k = std::max(begin, first); k < std::min(end, first + kChunkKeys); ++k) {
      const Element* from = key(k);
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        packed[d * kChunkKeys + k - first] = to_float(from[d * cache_.block_size]);
      }
    }
  }

  // The values of keys [begin, end) as floats, in panels of columns: [panels, kPartitionKeys,
  // kPanelColumns].
  void pack_values(int64_t begin, int64_t end, float* packed) const {
    for (int64_t k = begin; k < end;) {
      const int64_t left_in_block = cache_.block_size - (start_ + k) % cache_.block_size;
      const int64_t run_end = std::min(end, k + left_in_block);
      for (const Element* from = value(k); k < run_end; ++k, from += shape_.head_dim) {
        pack_value(from, packed + k * kPanelColumns);
      }
    }
  }

 private:
  bool chunks_are_whole() const { return cache_.block_size % kChunkKeys == 0; }

  // Dimension d of the key is d * block_size further.
  const Element* key(int64_t position) const {
    const int64_t offset = (start_ + position) % cache_.block_size;
    return static_cast<const Element*>(cache_.keys) + block_start(position) + offset;
  }

  const Element* value(int64_t position) const {
    const int64_t offset = (start_ + position) % cache_.block_size;
    return static_cast<const Element*>(cache_.values) + block_start(position) +
           offset * shape_.head_dim;
  }

  int64_t block_start(int64_t position) const {
    const int64_t block = block_table_[(start_ + position) / cache_.block_size];
    return first_element(cache_, shape_, block, kv_head_);
  }

  // Keys lie further apart in blocks of more than one chunk, and are then fetched in part.
  void fetch_chunk(const Element* chunk) const {
    constexpr int64_t kLineElements = 64 / sizeof(Element);
    for (int64_t i = 0; i < shape_.head_dim * kChunkKeys; i += kLineElements) fetch(chunk + i);
  }

  void pack_value(const Element* from, float* to) const {
    const auto panel_offset = [](int64_t d) {
      return d / kPanelColumns * kPanelColumns * kPartitionKeys + d % kPanelColumns;
    };
    int64_t d = 0;
    for (; d + kLanes <= shape_.head_dim; d += kLanes) {
      store(to + panel_offset(d), load_elements(from + d));
    }
    for (; d < shape_.head_dim; ++d) to[panel_offset(d)] = to_float(from[d]);
  }

  const KVLayer& cache_;
  const HeadShape& shape_;
  const int64_t kv_head_;
  const int32_t* const block_table_;
  const int64_t start_;
};

}  // namespace firsttoken
