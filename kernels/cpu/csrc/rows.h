// Work that falls into rows, each computed for itself.
#pragma once

#include <cstdint>

#include "threads.h"

namespace firsttoken {

// body(row) for each row. Few numbers stay on one thread: to call another would take longer.
template <class Body>
void for_each_row(ThreadPool& pool, int64_t num_rows, int64_t row_size, Body&& body) {
  constexpr int64_t kWorthSharing = 16384;
  if (num_rows * row_size < kWorthSharing) {
    for (int64_t row = 0; row < num_rows; ++row) body(row);
  } else {
    pool.for_each(num_rows, [&](int64_t row, int) { body(row); });
  }
}

}  // namespace firsttoken
