// SPDX-License-Identifier: Apache-2.0
// Memory of a layout by closed forms, for a search. plan::memory_per_rank is exact and takes a
// thousand times as long. Private: not installed.
#pragma once

#include <map>
#include <tuple>

#include "lockstep/config/train_config.h"
#include "lockstep/plan/run_description.h"
#include "lockstep/plan/step_time.h"

namespace lockstep::config {

class QuickMemory {
 public:
  // About as many bytes as the largest rank takes. Keeps what layers cost for the next call, which
  // must have the same configuration but for the layout.
  double bytes(const TrainConfig& config, const ModelSpec& model, const plan::Layout& layout);

 private:
  struct Costs {
    plan::LayerCost embedding = {}, block = {}, head = {};
  };
  const Costs& costs_of(const TrainConfig& config, const ModelSpec& model,
                        const plan::Layout& layout);

  std::map<std::tuple<int, bool, int64_t, layout::Recompute>, Costs> costs_;
};

}  // namespace lockstep::config
