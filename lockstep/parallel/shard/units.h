// SPDX-License-Identifier: Apache-2.0
// Which parameters of a model go together. Private: not installed.
#pragma once

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
};

// Whether a user's name of a type means this one: "mine::BlockImpl" is also called "BlockImpl" and
// "Block".
bool is_called(const std::string& type, const std::string& name);

// In the order of their first parameters. Units without parameters are left out, and a parameter is
// in one of them only.
std::vector<UnitPlan> plan_units(torch::nn::Module& model, const UnitPolicy& policy);

}  // namespace lockstep::parallel::detail
