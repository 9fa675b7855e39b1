// SPDX-License-Identifier: Apache-2.0
// What a flat is to be: the parameters of one kind in one unit, laid end to end in one line of
// memory that ranks share out. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/tiers/flat_offload.h"

namespace lockstep::parallel::detail {

struct FlatPlan {
  std::string unit;
  std::string name;  // of the flat: the unit's, and what tells it from others of the unit
  std::vector<optim::NamedParameter> parameters = {};
  // The rank of `shard` that has each of them, ascending; empty: ranks share rows.
  std::vector<int> owners = {};
  bool trained = true;
  bool resident = false;                       // gathered once a step and never dropped
  bool kept_for_backward = false;              // gathered from forward to backward
  bool whole_gradients = false;                // all-reduced instead of reduce-scattered
  bool updates_as_one = true;                  // the optimizer has one tensor for all of them
  bool reproducible = false;                   // sums are those of one fixed tree
  bool rehearsed = false;                      // on one rank, by the rules of several
  bool keeps_copy_on_host = false;             // of what was gathered, until the next step
  comm::Group shard = {};                      // ranks that share the parameters out
  comm::Group reduce = {};                     // the same ranks: what gradients are reduced over
  comm::Group replicas = {};                   // ranks that have the same shard
  at::ScalarType dtype = at::kFloat;           // the shard has
  at::ScalarType gather_dtype = at::kFloat;    // travels
  at::ScalarType compute_dtype = at::kFloat;   // the model sees
  at::ScalarType reduce_dtype = at::kFloat;    // gradients travel
  at::ScalarType gradient_dtype = at::kFloat;  // the optimizer sees
  c10::Device device = at::kCPU;               // the model's
  c10::Device rest_device = at::kCPU;          // the shard's
  std::optional<FlatOffload> offload = std::nullopt;

  // The model's inputs have the type that its parameters had.
  bool casts_inputs() const { return compute_dtype != dtype; }
  // What the model sees may be the shard itself.
  bool is_in_place() const {
    return shard.size() == 1 && rest_device == device && compute_dtype == dtype &&
           (!offload || offload->params == layout::Tier::device);
  }
  // The parameters stay the model's own: there is no other memory.
  bool is_own() const { return is_in_place() && !offload && !rehearsed; }
  // Parameters are encoded where they rest.
  bool is_encoded() const { return offload && offload->param_codec != codec::Codec::none; }
  // Gradients are reduced into the shards.
  bool scatters() const { return shard.size() > 1 && !whole_gradients; }
  const comm::Group& gradient_group() const { return shard.size() > 1 ? reduce : replicas; }
};

// The name of the unit of tensors that are too small to share out.
inline constexpr const char* kWholeTensors = "whole tensors";

// Where the plan's parameters lie in the line, and what each rank has of it.
layout::FlatLayout lay_out(const FlatPlan& plan);

}  // namespace lockstep::parallel::detail
