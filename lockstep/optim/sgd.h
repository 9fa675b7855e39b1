// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent.
#pragma once

#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/optim/elementwise_optimizer.h"

namespace lockstep::optim {

struct SGDOptions {
  double lr = 1e-2;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;    // needs momentum, and no dampening
  double weight_decay = 0;  // added to the gradient; of groups that give none
};

// The arithmetic of torch::optim::SGD, in one pass over memory. State of a parameter: with momentum
// momentum_buffer and step, and a float32 master if it has 16 bits.
class SGD final : public detail::ElementwiseOptimizer {
 public:
  explicit SGD(std::vector<ParameterGroup> groups, SGDOptions options = {});
  explicit SGD(std::vector<NamedParameter> parameters, SGDOptions options = {});
  explicit SGD(const torch::nn::Module& module, SGDOptions options = {});

 private:
  Kernel kernel_for(const detail::Update& update) const override;
  void update_on_device(std::span<const detail::Update> updates) const override;
  void update_by_operators(std::span<const detail::Update> updates) const override;
  bool update_sparse(const detail::Update& update) const override;

  SGDOptions options_;
};

}  // namespace lockstep::optim
