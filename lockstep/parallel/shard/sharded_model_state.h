// SPDX-License-Identifier: Apache-2.0
// A sharded model: the module, and the engine that runs it. Private: not installed.
#pragma once

#include <memory>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/shard/options.h"

namespace lockstep::parallel::detail {

class ShardedModelState {
 public:
  ShardedModelState(torch::nn::Module& model, FullyShardOptions options, const mesh::Mesh& mesh,
                    const Recording* recording, const MaterializeOptions& initializer);

  const std::shared_ptr<torch::nn::Module> model;
  const FullyShardOptions options;
  std::shared_ptr<ShardEngine> engine;  // none on a group of one that needs none

  // Nulls for a name that no parameter of a flat has.
  struct Place {
    const Flat* flat = nullptr;
    const Member* member = nullptr;
  };
  Place find(const std::string& parameter) const;
};

}  // namespace lockstep::parallel::detail
