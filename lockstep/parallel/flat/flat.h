// SPDX-License-Identifier: Apache-2.0
// Parameters of one kind in one unit, end to end in one line of memory that ranks share out:
// layout, shard, where the values are, and the way of the gradients. What differs between
// parameters that stay the model's own, are sharded or are offloaded is chosen here, once. Private:
// not installed.
#pragma once

#include <memory>

#include "lockstep/parallel/flat/flat_parameter.h"
#include "lockstep/parallel/flat/flat_shard.h"
#include "lockstep/parallel/flat/gradient_accumulator.h"
#include "lockstep/parallel/flat/offloaded_gradients.h"
#include "lockstep/parallel/flat/own_gradients.h"
#include "lockstep/parallel/flat/residence.h"

namespace lockstep::parallel::detail {

struct Flat {
  // Collective.
  Flat(FlatPlan given, const std::weak_ptr<ShardEngine>& engine, size_t index,
       FlatEnvironment& environment, const FlatShard::ValueOf& value_of)
      : parameter(std::move(given), engine, index),
        shard(parameter, value_of),
        residence(make_residence(parameter, shard, environment)) {
    if (parameter.plan().is_own()) {
      gradients = std::make_unique<OwnGradients>(parameter, shard, environment);
    } else if (!parameter.plan().offload) {
      gradients = std::make_unique<ShardedGradients>(parameter, shard, environment);
    } else {
      auto made = std::make_unique<OffloadedGradients>(parameter, shard, environment);
      offloaded = made.get();
      gradients = std::move(made);
    }
  }

  const FlatPlan& plan() const { return parameter.plan(); }
  const std::vector<Member>& members() const { return parameter.members(); }
  // What the parameters take on the device while they are gathered.
  size_t gathered_bytes() const {
    return static_cast<size_t>(parameter.layout().size) * c10::elementSize(plan().compute_dtype);
  }

  FlatParameter parameter;
  FlatShard shard;
  std::unique_ptr<Residence> residence;
  std::unique_ptr<GradientAccumulator> gradients;
  OffloadedGradients* offloaded = nullptr;  // the same, of an offloaded model
};

}  // namespace lockstep::parallel::detail
