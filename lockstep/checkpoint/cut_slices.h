// SPDX-License-Identifier: Apache-2.0
// Names, shapes and parts of slices, for saving and loading alike. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/layout/box.h"

namespace lockstep::checkpoint::detail {

// ConfigError unless the tensor has the shape that its placement says, and a type that travels.
void check_slice(const NamedSlice& slice);

// "layer.weight" of "optim.layer.weight.exp_avg"; of a parameter's name, itself.
std::string parameter_of(const std::string& slice);

// A view of the part of `tensor`, which holds `held`, that `box` is.
at::Tensor part_of(at::Tensor tensor, const layout::Box& held, const layout::Box& box);

}  // namespace lockstep::checkpoint::detail
