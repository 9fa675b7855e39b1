// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/parameters/parameters.h"

#include <torch/nn/module.h>

#include <unordered_set>

namespace lockstep::optim {

namespace {

// Each once, under its first name.
std::vector<NamedParameter> all_parameters(const torch::nn::Module& module) {
  std::vector<NamedParameter> found;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      found.push_back({item.key(), parameter});
  }
  return found;
}

}  // namespace

std::vector<NamedParameter> named_parameters(const torch::nn::Module& module) {
  std::vector<NamedParameter> found = all_parameters(module);
  std::erase_if(found, [](const NamedParameter& each) { return !each.tensor.requires_grad(); });
  return found;
}

layout::ModelParameters model_parameters(const torch::nn::Module& module) {
  layout::ModelParameters all;
  for (const auto& [name, tensor, parts] : all_parameters(module))
    all.add(name, tensor.sizes().vec(), static_cast<int64_t>(tensor.element_size()));
  return all;
}

std::vector<at::Tensor> tensors_of(std::span<const NamedParameter> parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

std::vector<ParameterGroup> decay_groups(std::span<const NamedParameter> parameters,
                                         double weight_decay) {
  std::vector<ParameterGroup> groups = {{.parameters = {}, .weight_decay = weight_decay},
                                        {.parameters = {}, .weight_decay = 0}};
  for (const NamedParameter& parameter : parameters) {
    groups[parameter.tensor.dim() > 1 ? 0 : 1].parameters.push_back(parameter);
  }
  return groups;
}

std::vector<ParameterGroup> decay_groups(const torch::nn::Module& module, double weight_decay) {
  return decay_groups(named_parameters(module), weight_decay);
}

}  // namespace lockstep::optim
