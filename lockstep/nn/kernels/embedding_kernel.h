// SPDX-License-Identifier: Apache-2.0
// What embedding_kernel.cu offers: launches on raw memory, without torch. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"

namespace lockstep::nn::cuda {

// Sums of the rows of a gradient that belong to the same row of a table. Runs of equal numbers
// among the sorted ones are summed in chunks, and what crosses the border of chunks from `partial`.
struct RowSums {
  int64_t count, width;
  const int32_t* sorted;  // numbers of rows of the table
  const int64_t* order;   // where each was before
  const void* gradient;   // (count, width)
  void* table;            // zeros; rows that are named are written
  float* partial;         // (2 * row_sum_chunks(), width)
};

bool can_sum_rows(int64_t width, DType dtype);
int64_t row_sum_chunks(int64_t count);
// Sums are in float32 and have a fixed order.
void launch_sum_rows(const RowSums& sums, DType dtype, void* stream);

}  // namespace lockstep::nn::cuda
