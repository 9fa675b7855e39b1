// SPDX-License-Identifier: Apache-2.0
// Steps that no rank may take alone: a gradient that is infinite or NaN on one rank makes all skip.
#pragma once

#include <cstdint>
#include <utility>

#include "lockstep/comm/group.h"
#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

class StepGuard {
 public:
  explicit StepGuard(comm::Group group = {}) : group_(std::move(group)) {}

  // Collective, one small all-reduce. Steps if the gradients are finite on all ranks; returns
  // whether it did. Reads the gradients once.
  bool step(Optimizer& optimizer);
  // With a norm of the gradients that is known, as from clip_grad_norm_ or grad_norm: no further
  // pass. With a `max_norm` above 0 the step clips them, as clip_grad_with_norm() does before one.
  bool step(Optimizer& optimizer, double grad_norm, double max_norm = 0);

  int64_t skipped_steps() const { return skipped_steps_; }

 private:
  comm::Group group_;
  int64_t skipped_steps_ = 0;
};

}  // namespace lockstep::optim
