// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/replica_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/linear.h"

namespace lockstep::parallel::detail {
namespace {

// Behind autograd's back: an output of this replica whose backward is still to come stays valid,
// because the value is the same unless the model itself was changed, and there autograd notices.
void copy_value(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() == to.sizes() && from.scalar_type() == to.scalar_type()) {
    to.data().copy_(from);
  } else {
    to.set_data(
        from.detach().to(to.device(), from.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
  }
}

}  // namespace

Replica::Replica(std::shared_ptr<torch::nn::Module> owner)
    : module(std::move(owner)),
      modules(module->modules()),
      parameters(module->parameters()),
      buffers(module->buffers()) {}

Replica clone(const Replica& model, c10::Device device) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(
        format("[DataParallel] {} cannot be replicated: {}", model.module->name(), why));
  };
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = model.module->clone(device);
  } catch (const c10::Error& error) {
    refuse(format("{} (models for several devices derive from torch::nn::Cloneable)",
                  error.what_without_backtrace()));
  }
  Replica replica(std::move(copy));
  const auto count = [](const Replica& r) {
    return format("{} modules, {} parameters and {} buffers", r.modules.size(), r.parameters.size(),
                  r.buffers.size());
  };
  if (count(replica) != count(model))
    refuse(format("its clone has {}, it has {}", count(replica), count(model)));
  // Children that are not Cloneable come as reset() has made them, on the CPU.
  replica.module->to(device);
  // copy_value() is not seen by what keeps codes of weights from step to step.
  for (const auto& module : replica.modules) {
    if (auto* const linear = module->as<nn::LinearImpl>()) linear->float8_cached = false;
  }
  copy_parameters(model, replica);
  copy_buffers(model, replica);
  return replica;
}

void copy_parameters(const Replica& from, Replica& to) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.parameters.size(); ++i) {
    copy_value(from.parameters[i], to.parameters[i]);
    to.parameters[i].set_requires_grad(from.parameters[i].requires_grad());
  }
  // Parents come before their children, and train() reaches down.
  for (size_t i = 0; i < from.modules.size(); ++i) {
    const bool training = from.modules[i]->is_training();
    if (to.modules[i]->is_training() != training) to.modules[i]->train(training);
  }
}

void copy_buffers(const Replica& from, Replica& to) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.buffers.size(); ++i) copy_value(from.buffers[i], to.buffers[i]);
}

void clear_gradients(Replica& replica) {
  for (at::Tensor& parameter : replica.parameters) parameter.mutable_grad() = at::Tensor();
}

void move_to(Replica& replica, c10::Device device) {
  const at::NoGradGuard no_grad;
  replica.module->to(device);
  for (at::Tensor& parameter : replica.parameters) {
    if (at::Tensor& gradient = parameter.mutable_grad(); gradient.defined())
      gradient = gradient.to(device);
  }
}

bool has_gradients(const Replica& replica) {
  return std::any_of(replica.parameters.begin(), replica.parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.grad().defined(); });
}

std::vector<at::Tensor> set_gradients_aside(Replica& replica) {
  std::vector<at::Tensor> gradients;
  for (at::Tensor& parameter : replica.parameters)
    gradients.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
  return gradients;
}

void add_gradients(Replica& replica, std::span<const at::Tensor> gradients) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    at::Tensor& sum = replica.parameters[i].mutable_grad();
    if (!sum.defined()) {
      sum = gradients[i];
    } else if (sum.is_sparse() && !gradients[i].is_sparse()) {
      sum = gradients[i].add_(sum);
    } else {
      sum.add_(gradients[i]);
    }
  }
}

void take_gradients(Replica& model, std::span<Replica* const> parts, double scale) {
  const at::NoGradGuard no_grad;
  if (std::find(parts.begin(), parts.end(), &model) == parts.end()) clear_gradients(model);
  for (Replica* part : parts) {
    if (part == &model) continue;
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      at::Tensor& sum = model.parameters[i].mutable_grad();
      at::Tensor& gradient = part->parameters[i].mutable_grad();
      if (!gradient.defined()) continue;
      const at::Tensor here = gradient.to(model.parameters[i].device());
      if (sum.defined()) {
        sum.add_(here);
      } else {
        sum = here;
      }
      gradient = at::Tensor();
    }
  }
  if (scale == 1) return;
  std::unordered_set<const c10::TensorImpl*> done;  // a parameter may be registered twice
  for (at::Tensor& parameter : model.parameters) {
    if (!done.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (at::Tensor& gradient = parameter.mutable_grad(); gradient.defined()) gradient.mul_(scale);
  }
}

}  // namespace lockstep::parallel::detail
