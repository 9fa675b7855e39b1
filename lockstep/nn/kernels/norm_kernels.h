// SPDX-License-Identifier: Apache-2.0
// What norm_kernels.cu offers: launches on raw memory, without torch. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"

namespace lockstep::nn::cuda {

// Rows that are divided by their root mean square and multiplied by a weight.
struct NormShape {
  int64_t rows, width;
  float epsilon;
  int processors;  // of the device
};

// Whether rows of this width, in memory that begins at multiples of 16 bytes, have kernels.
bool can_norm(int64_t width, DType dtype);

// `scales` becomes 1 / root mean square of each row. `amax` as in fused_kernels.h.
void launch_rms_norm(const NormShape& shape, DType dtype, const void* x, const void* weight,
                     void* out, float* scales, float* amax, void* stream);

// Rows of partial sums of the weight's gradient, float32, that a launch writes.
int64_t norm_partial_rows(const NormShape& shape, DType dtype);
struct NormGradients {
  const void* x;
  const void* weight;
  const float* scales;
  const void* out;     // of the result
  const void* around;  // of x by another way, added to that of x; or null
  void* to_x;          // null: not wanted
  void* to_weight;     // null: not wanted
  float* partial;      // norm_partial_rows() rows, unless to_weight is null
  float* amax;         // of to_x
};
// Sums have a fixed order.
void launch_rms_norm_backward(const NormShape& shape, DType dtype, const NormGradients& gradients,
                              void* stream);

}  // namespace lockstep::nn::cuda
