// SPDX-License-Identifier: Apache-2.0
// The initial values of a whole model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/nn/init.h"

namespace lockstep::nn {

// Returns whether it has given a parameter its values.
using InitializeRule = std::function<bool(const at::Tensor& parameter, const init::Source& source)>;

struct InitializeOptions {
  // What names begin with: "blocks.4." for a block that is built alone, as on a pipeline stage.
  std::string prefix = {};
  // Asked first, for every parameter. Returns whether it has dealt with it:
  //   [](const at::Tensor& parameter, const init::Source& source) {
  //     if (!source.name.ends_with(".proj.weight")) return false;
  //     init::normal_(parameter, source, {.std = 0.02});
  //     return true;
  //   }
  InitializeRule rule = {};
};

// Gives every parameter of the model new values, a function of the seed and of its name alone, with
// the distributions that torch's modules begin with. A tensor with two names has the values of the
// first. Throws ConfigError for a parameter that is registered by a module not of torch or of
// Lockstep and that the rule has not dealt with.
void initialize(torch::nn::Module& model, uint64_t seed, const InitializeOptions& options = {});

}  // namespace lockstep::nn
