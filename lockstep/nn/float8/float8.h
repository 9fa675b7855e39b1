// SPDX-License-Identifier: Apache-2.0
// Matrices of 8-bit floats with one scale each, and their products. Codes are tensors of bytes:
// older versions of torch have no type for them. On the CPU all of it is computed in software, with
// the numbers that a GPU has. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "lockstep/nn/float8/codes.h"

namespace lockstep::nn {

// Sizes of matrices must be multiples of this. The number of tokens need not: where they are summed
// over, zeros are added.
constexpr int64_t kFloat8Multiple = 16;

// Why 8-bit products cannot be computed on the device; empty where they can.
std::string float8_missing(c10::Device device);

// The largest magnitude of a matrix, float32 (1), where the matrix is. NaN if any element is.
at::Tensor float8_amax(const at::Tensor& matrix);

struct Float8Matrix {
  at::Tensor codes;       // (rows, columns)
  at::Tensor transposed;  // (columns, rows rounded up to kFloat8Multiple, with zeros)
  at::Tensor inverse;     // float32 (1): values are codes times this
  Float8 kind = Float8::e4m3;
};

enum class Float8Layout { rows, transposed, both };

// Codes of a contiguous matrix that is at most `amax` large; of both layouts those that are wanted.
Float8Matrix float8_cast(const at::Tensor& matrix, const at::Tensor& amax, Float8 kind,
                         Float8Layout layout);

// The codes of `transposed` from those of the rows.
at::Tensor float8_transpose(const at::Tensor& codes);

struct Float8Operand {
  at::Tensor codes;  // (M, K), or (N, K)
  at::Tensor inverse;
  Float8 kind = Float8::e4m3;
};

struct Float8ProductOptions {
  at::ScalarType type = at::kFloat;  // of the result
  bool fast = false;                 // sums of fewer bits, where the device has them
  at::Tensor bias = {};              // (N), or undefined
  at::Tensor added = {};             // (M, N), or undefined
  bool in_place = false;             // the result is written into what is added
};

// a (M, K) times b (N, K) transposed, with their scales, plus the bias and what is added.
at::Tensor float8_product(const Float8Operand& a, const Float8Operand& b,
                          const Float8ProductOptions& options);

}  // namespace lockstep::nn
