// SPDX-License-Identifier: Apache-2.0
// The L2 norm whose bits do not depend on how the gradients are cut. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <span>

#include "lockstep/comm/group.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail {

// Over all ranks of the group. Collective, two small all-reduces. The relative error is below 1e-15
// for up to 2^40 elements. Squares of float64 are rounded to float64 first.
double exact_norm(std::span<const at::Tensor> gradients, const comm::Group& group);

// A FixedSum of many elements: number i is limbs[2 * i] * 2^32 + limbs[2 * i + 1].
using FixedLimbs = std::array<int64_t, 4>;

// Any device, any type and any strides: bit for bit what the kernels count.
FixedLimbs sum_squares_by_operators(const at::Tensor& tensor, const Grid& grid);

// What they stand for; the same for all limbs that stand for the same two numbers.
double value_of(const FixedLimbs& limbs, const Grid& grid);

}  // namespace lockstep::optim::detail
