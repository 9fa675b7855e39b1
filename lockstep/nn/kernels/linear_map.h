// SPDX-License-Identifier: Apache-2.0
// at::linear, faster for few vectors. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::nn {

// (..., in) x (out, in) -> (..., out). Where no gradient is recorded, up to kMostVectors vectors
// are computed by a kernel that reads the matrix once, at the speed of the memory; a BLAS takes
// longer, on the CPU several times as long. The kernel's result for a vector does not depend on the
// others.
at::Tensor linear_map(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// What is computed together with such a product. What is undefined is left out.
struct FusedLinear {
  at::Tensor weight, bias;
  // Of the norm of the input. Without a bias it is of the root mean square.
  at::Tensor norm_weight = {}, norm_bias = {};
  double epsilon = 0;
  enum class Activation : uint8_t { none, gelu, swiglu } activation = Activation::none;
  at::Tensor residual = {};  // added at the end
};

// Whether fused_linear() has a kernel for these vectors: few of them, on a CUDA device.
bool can_fuse(const at::Tensor& input);
// activation(norm(input) weight^T + bias) + residual, in one kernel.
at::Tensor fused_linear(const at::Tensor& input, const FusedLinear& linear);

}  // namespace lockstep::nn
