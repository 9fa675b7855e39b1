// SPDX-License-Identifier: Apache-2.0
// Which ranks' own losses or gradients were not finite before they were averaged. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::train {

// One sum for each bucket or unit of gradients shows whether all of it is finite. On a device
// nothing waits for it: the sums are read where a step is found to be bad.
class GradientWatch {
 public:
  // For the options of DDP and of sharding. What it returns shares this object's state.
  parallel::GradientObserver observer() const;

  // Before a step.
  void clear() const { seen_->clear(); }
  // Collective, after a step whose gradients were not finite, before these are cleared: the ranks
  // that are the cause, as "rank 2 (its loss)" or "rank 2 (gradient of embed.weight)". The same on
  // all ranks. `loss` is this rank's own; `parameters` have averaged gradients.
  std::string explain(const at::Tensor& loss, std::span<const optim::NamedParameter> parameters,
                      const comm::Group& world) const;

 private:
  struct Seen {
    at::Tensor sum;
    std::vector<std::string> names;
  };
  std::shared_ptr<std::vector<Seen>> seen_ = std::make_shared<std::vector<Seen>>();
};

}  // namespace lockstep::train
