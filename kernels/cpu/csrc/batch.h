// What the kernels know of a step: plain views of memory that the caller owns.
#pragma once

#include <cstdint>

namespace firsttoken {

// A step's requests, flattened. Letters are dimensions as in kernels/ops.py.
struct Batch {
  int64_t num_tokens;             // T
  int64_t num_requests;           // R
  const int64_t* positions_T;
  const int64_t* slot_mapping_T;  // block * block_size + offset
  const int32_t* query_start_loc_R1;
  const int32_t* seq_lens_R;
  const int32_t* block_table_RM;
  int64_t blocks_per_row;         // M
};

struct HeadShape {
  int64_t num_heads;     // N
  int64_t num_kv_heads;  // K
  int64_t head_dim;      // D
};

// One layer's keys and values. Within a block a head's numbers lie together, and keys are
// transposed, so that a vector holds one dimension of neighbouring tokens:
//
//     keys    [B, K, D, S]      values  [B, K, S, D]
struct KVLayer {
  void* keys;
  void* values;
  bool half;  // float16, else float32
  int64_t block_size;  // S
};

}  // namespace firsttoken
