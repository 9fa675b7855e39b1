// SPDX-License-Identifier: Apache-2.0
// A sharded model: the module, and the engine that runs it. Private: not installed.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/parallel/intercept/deferred.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/shard/nesting.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/units.h"

namespace lockstep::parallel::detail {

class ShardedModelState {
 public:
  ShardedModelState(torch::nn::Module& model, FullyShardOptions options, const mesh::Mesh& mesh,
                    const Recording* recording, const MaterializeOptions& initializer);

  const std::shared_ptr<torch::nn::Module> model;
  const FullyShardOptions options;
  const std::vector<int> ranks;         // of the world
  std::shared_ptr<ShardEngine> engine;  // none on a group of one that needs none
  std::vector<KnownUnit> known_units;   // for a larger model
  // The model is a part of a larger one, which has its engine.
  bool taken_over = false;
  // The parameters are on the meta device. A larger model gets them, with their initial values.
  bool without_values = false;

  // Nulls for a name that no parameter of a flat has.
  struct Place {
    const Flat* flat = nullptr;
    const Member* member = nullptr;
  };
  Place find(const std::string& parameter) const;

 private:
  // The units of the model and of those inside it, all with their options. Fills known_units.
  std::vector<UnitPlan> plan_with_options(const std::vector<NestedModel>& nested);
};

}  // namespace lockstep::parallel::detail
