// SPDX-License-Identifier: Apache-2.0
// AdamW on CUDA memory in one pass, in builds that have the kernel; adamw_no_cuda.cpp stands in
// where it is not built. Private: not installed.
#pragma once

#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail::cuda {

// Queues the update on the current stream of the parameter's device. False where there is no kernel
// for tensors like these.
bool adamw(const Update& update, const AdamWFactors& factors);

}  // namespace lockstep::optim::detail::cuda
