// SPDX-License-Identifier: Apache-2.0
// What float8_kernels.cu offers: launches on raw memory, without torch. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"
#include "lockstep/nn/float8/codes.h"

namespace lockstep::nn::cuda {

// Into one float32, which becomes the largest magnitude of `count` elements.
void launch_amax(int64_t count, DType dtype, const void* data, float* amax, void* stream);

// Columns are a multiple of 8, rows begin at multiples of 16 bytes, and padded_rows is a multiple
// of 4. Of codes and transposed (columns, padded_rows) either may be null.
struct CastOptions {
  int64_t rows, columns, padded_rows;
  Float8 kind;
  float largest;  // of the kind
  const float* amax;
  uint8_t *codes, *transposed;
  float* inverse;
};
void launch_cast(const CastOptions& options, DType dtype, const void* data, void* stream);

// (rows, columns) to (columns, padded_rows), with zeros after the last row.
void launch_transpose(int64_t rows, int64_t columns, int64_t padded_rows, const uint8_t* codes,
                      uint8_t* transposed, void* stream);

}  // namespace lockstep::nn::cuda
