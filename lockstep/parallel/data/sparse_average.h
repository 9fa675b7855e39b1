// SPDX-License-Identifier: Apache-2.0
// Averages gradients of which only some rows are non-zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::parallel::detail {

// Begins to average a sparse tensor over the group; an undefined one counts as all zero. What is
// returned completes it and gives the average, coalesced. Only the stored rows travel. `shape` has
// the sizes, dtype and device, for ranks that have nothing.
std::function<at::Tensor()> begin_sparse_average(const at::Tensor& gradient,
                                                 const at::Tensor& shape, const comm::Group& group,
                                                 const std::string& tag);

}  // namespace lockstep::parallel::detail
