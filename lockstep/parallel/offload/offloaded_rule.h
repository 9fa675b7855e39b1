// SPDX-License-Identifier: Apache-2.0
// What makes an offloaded optimizer AdamW or SGD. Private: not installed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/kernels/packed_update.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel {

struct OffloadedOptimizer::Rule {
  // One parameter in one step, counted from 1.
  struct Step {
    int64_t step;
    double lr;
    double weight_decay;
  };

  std::string name;         // for messages
  layout::UpdateRule kind;  // fully_shard must have planned for it
  std::vector<std::string> moments;
  double lr;
  double weight_decay;  // of groups that give none
  std::function<optim::PackedFactors(const Step&)> factors;

  // ConfigError where the model is not offloaded, or was planned for another rule.
  const std::shared_ptr<detail::OffloadTiers>& tiers_of(const ShardedModel& model) const;
};

}  // namespace lockstep::parallel
