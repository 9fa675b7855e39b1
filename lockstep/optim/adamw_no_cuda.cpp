// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/adamw_cuda.h"

namespace lockstep::optim::detail::cuda {

bool adamw(const Update&, const AdamWFactors&) { return false; }

}  // namespace lockstep::optim::detail::cuda
