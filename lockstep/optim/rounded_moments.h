// SPDX-License-Identifier: Apache-2.0
// Moments in bfloat16 between tensors and the kernels that round them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail {

// Elements [begin, end) of an update, which are runs of one tensor: the operands are at the first
// of them, and the kernels count from there.
struct RoundedPart {
  Operands operands;
  int64_t begin, end;
  MomentDraws draws;
};

// Of an update whose moments are rounded, ascending. Its tensors are contiguous.
std::vector<RoundedPart> rounded_parts(const Update& update, uint64_t seed);

// By torch's operators, for any device and any strides: rounds these float32 values to the update's
// buffers.
void store_rounded(const Update& update, uint64_t seed, const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq);

}  // namespace lockstep::optim::detail
