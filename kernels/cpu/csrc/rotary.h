#pragma once

#include "batch.h"

namespace firsttoken {

// One token: rotates q in place, writes rotated k, and v, into the slot. Dimension i is paired with
// i + D/2; cos_sin_D holds D/2 cosines, then D/2 sines of the token's position.
void rotary_cache_write_row(float* q_ND, const float* k_KD, const float* v_KD,
                            const float* cos_sin_D, int64_t slot, const HeadShape& shape,
                            const KVLayer& cache);

}  // namespace firsttoken
