// SPDX-License-Identifier: Apache-2.0
// Between tensors and the memory that the kernels work on. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/core/dtype.h"
#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail {

// None for types that are not optimized.
std::optional<DType> dtype_of(const at::Tensor& tensor);

// Whether elements of the same index lie at the same offset.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

Operands operands_of(const Update& update);

// Elements [begin, end) of an update, which are runs of one tensor: the operands are at the first
// of them, and the kernels count from there.
struct RoundedPart {
  Operands operands;
  int64_t begin, end;
  MomentDraws draws;
};

// Of an update whose moments are rounded, ascending. Its tensors are contiguous.
std::vector<RoundedPart> rounded_parts(const Update& update, uint64_t seed);

// The same for any device and any strides, on the CPU: rounds these float32 values to the update's
// buffers.
void store_rounded(const Update& update, uint64_t seed, const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq);

}  // namespace lockstep::optim::detail
