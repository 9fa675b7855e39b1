// SPDX-License-Identifier: Apache-2.0
// Updates of CUDA memory in one pass, in builds that have the kernels; update_no_cuda.cpp stands in
// where they are not built. Private: not installed.
#pragma once

#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail::cuda {

// Queue the update on the current stream of the parameter's device. False where there is no kernel
// for tensors like these.
bool adamw(const Update& update, const AdamWFactors& factors);
bool sgd(const Update& update, SgdKind kind, const SgdFactors& factors);

}  // namespace lockstep::optim::detail::cuda
