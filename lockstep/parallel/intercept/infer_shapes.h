// SPDX-License-Identifier: Apache-2.0
// Operators that are called for the shapes of their results alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "lockstep/parallel/intercept/operator_facts.h"

namespace lockstep::parallel::detail {

// Calls the operator with tensors without memory in place of the arguments and returns its results,
// likewise without memory. An argument that the operator changes in place is returned as it is.
// Operators that torch cannot call so get memory for the time of the call, if they are not random.
torch::jit::Stack outline(const c10::OperatorHandle& op, const Arguments& arguments);

}  // namespace lockstep::parallel::detail
