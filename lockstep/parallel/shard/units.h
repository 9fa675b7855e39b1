// SPDX-License-Identifier: Apache-2.0
// Which parameters of a model go together. Private: not installed.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/shard/options.h"

namespace lockstep::parallel::detail {

struct UnitPlan {
  // The module's path; "model" for the model itself or, if a child is called that, "model itself".
  std::string name;
  std::vector<optim::NamedParameter> parameters;  // by the first of their names in the model
  std::string path = {};                          // the module's; empty for the model itself
  // Of the call that sharded an inner model; null: those of the call that plans.
  std::shared_ptr<const FullyShardOptions> options = nullptr;
};

// A unit of a model that was sharded earlier, by names inside that model: policies are not asked
// again, since what a predicate refers to may have gone.
struct KnownUnit {
  std::string path;
  std::vector<std::string> parameters;
  std::shared_ptr<const FullyShardOptions> options;
};
using KnownUnits = std::map<const torch::nn::Module*, std::vector<KnownUnit>>;

// Whether a user's name of a type means this one: "mine::BlockImpl" is also called "BlockImpl" and
// "Block".
bool is_called(const std::string& type, const std::string& name);

// Where a parameter stands among FullyShardOptions' first_tensors, which are names of parameters or
// of modules; none: it is not one of them.
std::optional<size_t> place_among(const std::vector<std::string>& first_tensors,
                                  const std::string& parameter);

// In the order of their first parameters. Units without parameters are left out, and a parameter is
// in one of them only. Modules with known units keep them; the policy is for the rest.
std::vector<UnitPlan> plan_units(torch::nn::Module& model, const UnitPolicy& policy,
                                 const KnownUnits& known = {});

}  // namespace lockstep::parallel::detail
