// SPDX-License-Identifier: Apache-2.0
// What replicas of a model have in common: parameters, buffers, modes and gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <span>
#include <vector>

#include "lockstep/core/torch_fwd.h"

namespace lockstep::parallel::detail {

// A module with its parts in fixed order: the same places mean the same things in all replicas.
struct Replica {
  explicit Replica(std::shared_ptr<torch::nn::Module> module);

  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::vector<at::Tensor> parameters, buffers;
};

// By Module::clone. Throws ConfigError where the model does not have that, or leaves parts out.
Replica clone(const Replica& model, c10::Device device);

// Also which parameters are frozen, and which modules are in training mode.
void copy_parameters(const Replica& from, Replica& to);
void copy_buffers(const Replica& from, Replica& to);

void clear_gradients(Replica& replica);
// Moves parameters, buffers and gradients.
void move_to(Replica& replica, c10::Device device);
bool has_gradients(const Replica& replica);
// Takes the gradients away from the replica, and adds such to those it has.
std::vector<at::Tensor> set_gradients_aside(Replica& replica);
void add_gradients(Replica& replica, std::span<const at::Tensor> gradients);
// The gradients of `model` become the sum of those of `parts` (of which it may be one), in order,
// times `scale`. The other parts lose theirs.
void take_gradients(Replica& model, std::span<Replica* const> parts, double scale);

}  // namespace lockstep::parallel::detail
