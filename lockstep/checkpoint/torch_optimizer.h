// SPDX-License-Identifier: Apache-2.0
// The state of torch's own optimizers as named tensors. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::checkpoint::detail {

struct StateTensor {
  std::string name;  // "layer.weight.exp_avg"
  at::Tensor tensor;
  std::function<void()> saving = {}, loaded = {};  // as in NamedSlice
};

// Of Adam, AdamW, SGD, RMSprop and Adagrad; ConfigError for others, and for parameters of the
// optimizer's that have no name. What does not exist before the first step is made, as the first
// step would.
std::vector<StateTensor> state_of(torch::optim::Optimizer& optimizer,
                                  std::span<const optim::NamedParameter> names);

}  // namespace lockstep::checkpoint::detail
