// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/update_cuda.h"

namespace lockstep::optim::detail::cuda {

bool adamw(const Update&, const AdamWFactors&) { return false; }
bool sgd(const Update&, SgdKind, const SgdFactors&) { return false; }

}  // namespace lockstep::optim::detail::cuda
