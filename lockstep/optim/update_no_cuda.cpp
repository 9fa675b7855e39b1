// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"
#include "lockstep/optim/update_cuda.h"

namespace lockstep::optim::detail::cuda {

bool has_kernel(const Update&) { return false; }
void adamw(std::span<const Update>, const std::function<AdamWFactors(const Update&)>&, uint64_t) {
  check(false, "there is no kernel");
}
void sgd(std::span<const Update>, SgdKind, const std::function<SgdFactors(const Update&)>&) {
  check(false, "there is no kernel");
}

}  // namespace lockstep::optim::detail::cuda
