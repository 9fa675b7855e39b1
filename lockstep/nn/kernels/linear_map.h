// SPDX-License-Identifier: Apache-2.0
// at::linear, faster for few vectors on the CPU. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// (..., in) x (out, in) -> (..., out). Where no gradient is recorded, up to kMostVectors vectors in
// the CPU's memory are computed by a kernel that reads the matrix once, at the speed of the memory;
// a BLAS takes several times as long. The kernel's result for a vector does not depend on the
// others.
at::Tensor linear_map(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep::nn
