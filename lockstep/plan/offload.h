// Where the parameters, gradients and optimizer state of a run will rest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/layout/offload_places.h"

namespace lockstep::plan {

// Layers as this rank has them, in the order in which a forward uses them: "embed", "positions",
// "blocks.0" ..., "norm", "head"; and first, where ranks share parameters, "small", those that are
// too small to be shared. State has 4 + 4 bytes for each element, 2 more for a bfloat16 parameter;
// on the host encoded as offload.codec says, by its nominal ratio. In slices of at most 2^22
// elements.
std::vector<layout::OffloadUnit> offload_units(const config::TrainConfig& config,
                                               const config::ModelSpec& model, int world, int rank);

// Bytes, by kind.
struct KindBytes {
  int64_t params = 0, grads = 0, states = 0;
  int64_t sum() const { return params + grads + states; }
};

struct OffloadPlan {
  layout::OffloadOptions options = {};  // nothing left open
  std::vector<layout::OffloadUnit> units = {};
  layout::OffloadPlaces places = {};
  KindBytes working = {};                // what is used and what is next, of each kind
  KindBytes resting = {}, on_host = {};  // of each kind
};

// ConfigError where it does not fit. Budgets that are left open have their defaults, whatever this
// machine has.
OffloadPlan plan_offload(const config::TrainConfig& config, const config::ModelSpec& model,
                         int world, int rank);

// A table of what rests where, and the budgets.
std::string to_text(const OffloadPlan& plan);

}  // namespace lockstep::plan
