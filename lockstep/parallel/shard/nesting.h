// SPDX-License-Identifier: Apache-2.0
// Sharded models inside a larger one.
//
//   for (auto& block : blocks) fully_shard(*block, group, of_blocks);
//   auto sharded = fully_shard(*model, group, of_the_rest);
//
// The outer call takes the inner models over: their units become units of its engine, with the
// options that they were sharded with, and the inner engines go. An engine that goes leaves its
// shards with the model's parameters (LeftShard), so the caller need not keep what the inner calls
// returned. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/flat/flat_parameter.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/units.h"

namespace lockstep::parallel::detail {

class ShardedModelState;

// What a call of fully_shard did to a module.
struct NestedModel {
  std::weak_ptr<torch::nn::Module> module = {};
  std::weak_ptr<ShardedModelState> state = {};  // gone, where what the call returned was not kept
  FullyShardOptions options = {};
  std::vector<int> ranks = {};        // of the world
  bool has_engine = false;            // its parameters were shared out
  std::vector<KnownUnit> units = {};  // also of the models inside it
  std::string path = {};              // in the larger model
};

// Lets later calls find the model. Not one that no other can contain, because no shared_ptr owns
// it.
void remember_sharded(const std::shared_ptr<ShardedModelState>& state);
// The sharded models inside a model, without those inside them.
std::vector<NestedModel> find_nested(torch::nn::Module& model);

KnownUnits known_units(const std::vector<NestedModel>& nested);
// The type of a parameter's shard, or of the parameter, if it is not sharded.
at::ScalarType shard_dtype(const at::Tensor& parameter);

// Throws ConfigError where an inner model cannot become a part of a model with these options.
// `has_recording`: the larger model gets its initial values now. What inner models have gathered is
// dropped.
void require_nestable(const std::vector<NestedModel>& nested, const FullyShardOptions& options,
                      const std::vector<int>& ranks, bool has_recording);
// The engines of inner models go, and what was returned for them cannot be used any more. On no
// rank may one be in use.
void take_over(const std::vector<NestedModel>& nested);

// Whole values of parameters that inner models had shared out; all others as they are. Collective;
// at most one flat is whole at a time.
class NestedValues {
 public:
  // `group`: the ranks that share parameters out.
  explicit NestedValues(comm::Group group) : group_(std::move(group)) {}
  at::Tensor operator()(const at::Tensor& parameter);

 private:
  comm::Group group_;
  std::shared_ptr<const LeftShard> left_;
  at::Tensor line_;
};

}  // namespace lockstep::parallel::detail
