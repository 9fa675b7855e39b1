// SPDX-License-Identifier: Apache-2.0
// Between tensors and the memory that the kernels work on. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "lockstep/core/dtype.h"
#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail {

// None for types that are not optimized.
std::optional<DType> dtype_of(const at::Tensor& tensor);

// Whether elements of the same index lie at the same offset.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

Operands operands_of(const Update& update);

}  // namespace lockstep::optim::detail
