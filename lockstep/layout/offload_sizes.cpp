// SPDX-License-Identifier: Apache-2.0
// Rules of offload_plan.h that need no plan.
#include "lockstep/layout/offload_plan.h"

namespace lockstep::layout {

KindBytes& KindBytes::operator+=(const KindBytes& other) {
  params += other.params;
  grads += other.grads;
  states += other.states;
  return *this;
}

int64_t num_gradient_blocks(bool in_backward, bool cuda) { return in_backward && cuda ? 4 : 2; }

size_t units_ahead(std::span<const size_t> parameters, int prefetch) {
  size_t units = 0, sum = 0;
  while (units < parameters.size() &&
         (units == 0 || sum + parameters[units] <= static_cast<size_t>(prefetch))) {
    sum += parameters[units++];
  }
  return units;
}

}  // namespace lockstep::layout
