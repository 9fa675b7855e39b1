// SPDX-License-Identifier: Apache-2.0
// Dynamic loss scaling, for training in float16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/optimizer.h"

namespace lockstep::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // steps without overflow before the scale grows
};

// Small gradients vanish in float16. So the loss is multiplied by a scale, and the gradients
// divided by it before the step. When they overflow on any rank all ranks skip the step and the
// scale shrinks; when they have not for a while it grows. One iteration:
//
//   scaler.scale(loss).backward();
//   scaler.unscale(optimizer);                        // only where gradients are looked at, as
//   clip_grad_norm_(optimizer.parameters(), max_norm); // for clipping
//   scaler.step(optimizer);
//   scaler.update();
class GradScaler {
 public:
  explicit GradScaler(comm::Group group = {}, GradScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  // Collective, one small all-reduce. Divides the gradients in place, in one pass, and agrees
  // whether any is infinite or NaN. Gradients in float16 are replaced by float32 ones, because what
  // is divided no longer fits. At most once for an optimizer between updates.
  void unscale(Optimizer& optimizer);
  // Unscales if that was not done; then steps, or skips, as all ranks do. Returns whether it did.
  bool step(Optimizer& optimizer);
  // Ends the iteration: sets the scale for the next.
  void update();

  double scale() const;
  int64_t skipped_steps() const { return skipped_steps_; }

  // "grad_scaler.scale" and "grad_scaler.growth_tracker", as Optimizer::state().
  std::vector<NamedTensor> state();
  void load_state(std::span<const NamedTensor> entries);

 private:
  struct Stage {  // of an optimizer since the last update
    bool overflowed = false;
    bool stepped = false;
  };

  comm::Group group_;
  GradScalerOptions options_;
  at::Tensor scale_;           // float64, 0-d
  at::Tensor growth_tracker_;  // int64, 0-d: steps since the last overflow or growth
  std::map<const Optimizer*, Stage> stages_;
  int64_t skipped_steps_ = 0;
};

}  // namespace lockstep::optim
