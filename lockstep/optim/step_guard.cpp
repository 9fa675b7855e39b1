// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/step_guard.h"

#include <cmath>

#include "lockstep/optim/clip.h"
#include "lockstep/optim/gradient_passes.h"

namespace lockstep::optim {

bool StepGuard::step(Optimizer& optimizer) {
  return step(optimizer, grad_norm(optimizer.parameters(), {.type = NormType::max}));
}

bool StepGuard::step(Optimizer& optimizer, double grad_norm, double max_norm) {
  const bool skip = detail::any_rank(!std::isfinite(grad_norm), group_);
  if (skip) {
    ++skipped_steps_;
  } else {
    optimizer.step_scaled(max_norm > 0 ? clip_factor(max_norm, grad_norm) : 1);
  }
  return !skip;
}

}  // namespace lockstep::optim
