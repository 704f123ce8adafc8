#pragma once

#include "batch.h"
#include "threads.h"

namespace firsttoken {

// Causal attention of the step's tokens over the cache, which holds their own keys already.
// Row t of q is at q + t * q_stride, [N, D]; out likewise. `sliding_window`: tokens, 0 for none.
// A token's bits follow from its position and context alone.
void paged_attention(ThreadPool& pool, const Batch& batch, const HeadShape& shape,
                     const KVLayer& cache, float scale, int64_t sliding_window, const float* q,
                     int64_t q_stride, float* out, int64_t out_stride);

}  // namespace firsttoken
