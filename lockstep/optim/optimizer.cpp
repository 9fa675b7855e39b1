// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/optimizer.h"

#include "lockstep/optim/gradient_passes.h"

namespace lockstep::optim {

std::vector<at::Tensor> Optimizer::parameters() {
  std::vector<at::Tensor> all;
  for (const ParameterGroup& group : groups()) {
    for (const NamedParameter& parameter : group.parameters) all.push_back(parameter.tensor);
  }
  return all;
}

void Optimizer::step_scaled(double factor) {
  if (factor != 1) detail::scale(detail::gradients_of(parameters()), factor);
  step();
}

void Optimizer::zero_grad() {
  for (const at::Tensor& parameter : parameters()) parameter.mutable_grad() = at::Tensor();
}

}  // namespace lockstep::optim
