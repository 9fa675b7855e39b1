// SPDX-License-Identifier: Apache-2.0
// Parameters by name, and how they are grouped.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/placement.h"

namespace lockstep::optim {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Elements of a parameter that are a slice of a tensor of the whole model.
struct PlacedPart {
  layout::Placement placement;
  int64_t begin = 0;  // of the slice among the parameter's elements; both are in row-major order
};

// A parameter, or what this rank has of one or of several.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  // None: the parameter is a whole tensor of this name. What no part has is padding, and zero.
  std::vector<PlacedPart> parts = {};
};

// Parameters that are stepped alike.
struct ParameterGroup {
  std::vector<NamedParameter> parameters;
  std::optional<double> weight_decay = std::nullopt;  // the optimizer's, if not given
  double lr_scale = 1;  // the group's learning rate is this times the optimizer's
};

// The parameters that require a gradient, in the module's order, a shared one once.
std::vector<NamedParameter> named_parameters(const torch::nn::Module& module);

// All parameters of the module, frozen ones too, in its order, a shared one once under its first
// name. Of a sharded or deferred model: with their whole shapes.
layout::ModelParameters model_parameters(const torch::nn::Module& module);

std::vector<at::Tensor> tensors_of(std::span<const NamedParameter> parameters);

// Two groups: matrices and larger, which decay, and vectors and scalars (biases, norms), which do
// not. Either may be empty.
std::vector<ParameterGroup> decay_groups(std::span<const NamedParameter> parameters,
                                         double weight_decay);
std::vector<ParameterGroup> decay_groups(const torch::nn::Module& module, double weight_decay);

}  // namespace lockstep::optim
