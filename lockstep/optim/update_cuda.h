// SPDX-License-Identifier: Apache-2.0
// Updates of CUDA memory in one pass, in builds that have the kernels; update_no_cuda.cpp stands in
// where they are not built. Private: not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "lockstep/optim/elementwise_optimizer.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail::cuda {

// Whether there is a kernel for tensors like these.
bool has_kernel(const Update& update);

// Queue updates that have one on the current streams of their devices: one kernel for many
// parameters of the same types whose factors are equal. `seed` is that of rounded moments.
void adamw(std::span<const Update> updates,
           const std::function<AdamWFactors(const Update&)>& factors_of, uint64_t seed);
void sgd(std::span<const Update> updates, SgdKind kind,
         const std::function<SgdFactors(const Update&)>& factors_of);

}  // namespace lockstep::optim::detail::cuda
