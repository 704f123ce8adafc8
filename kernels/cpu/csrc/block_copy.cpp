#include <cstdint>
#include <cstring>

#include "threads.h"

extern "C" {

// In each plane of the cache (keys or values of a layer), block destinations[i] becomes
// sources[i]. Returns 0, or 1 and copies nothing where a block is not one of the plane's.
int ft_copy_blocks(uint8_t* cache, int64_t num_planes, int64_t num_blocks, int64_t block_bytes,
                   const int64_t* sources_C, const int64_t* destinations_C, int64_t num_copies) {
  const auto exists = [&](int64_t block) { return block >= 0 && block < num_blocks; };
  for (int64_t i = 0; i < num_copies; ++i) {
    if (!exists(sources_C[i]) || !exists(destinations_C[i])) return 1;
  }
  firsttoken::PoolLease pool;
  (*pool).for_each(num_planes * num_copies, [&](int64_t item, int) {
    uint8_t* plane = cache + item / num_copies * num_blocks * block_bytes;
    const int64_t i = item % num_copies;
    std::memcpy(plane + destinations_C[i] * block_bytes, plane + sources_C[i] * block_bytes,
                static_cast<size_t>(block_bytes));
  });
  return 0;
}
}
