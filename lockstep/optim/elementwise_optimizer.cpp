// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/elementwise_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/optim/gradient_passes.h"
#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/parameters/named_state.h"
#include "lockstep/optim/parameters/placed_runs.h"
#include "lockstep/optim/tensor_memory.h"
#include "lockstep/optim/update_cuda.h"

namespace lockstep::optim::detail {
namespace {

bool is_16_bit(const at::Tensor& tensor) { return tensor.element_size() == 2; }

// Whether a kernel of the device takes the gradient as it is.
bool is_for_device(const Update& update) {
  return update.grad.layout() == at::kStrided && cuda::has_kernel(update);
}

// What a parameter is computed in, and so the type of its state.
at::ScalarType compute_type(const at::Tensor& param) {
  return is_16_bit(param) ? at::kFloat : param.scalar_type();
}

std::string describe(const at::Tensor& tensor) {
  return format("{} ({}) on {}", c10::toString(tensor.scalar_type()), join(tensor.sizes()),
                tensor.device().str());
}

// Dense memory that the kernels can walk from its first element to its last.
bool has_kernel(const Update& update) {
  const auto alike = [&](const at::Tensor& state) { return same_layout(state, update.param); };
  return update.param.is_cpu() && update.param.is_non_overlapping_and_dense() &&
         (!update.master.defined() || alike(update.master)) &&
         std::all_of(update.buffers.begin(), update.buffers.end(), alike) &&
         (!update.places || update.param.is_contiguous());
}

at::Tensor grad_for_kernel(const Update& update) {
  const bool native = update.grad.scalar_type() == update.param.scalar_type() ||
                      update.grad.scalar_type() == update.weight().scalar_type();
  const auto type = native ? update.grad.scalar_type() : update.weight().scalar_type();
  if (native && update.grad.is_cpu() && same_layout(update.grad, update.param)) return update.grad;
  return at::empty_like(update.param, update.param.options().dtype(type)).copy_(update.grad);
}

// Kernels write through pointers, unseen by torch. What an in-place operator would have done:
// autograd learns that what it saved is gone, and the owner of a dispatch key on the parameter (to
// gather or to guard its memory) gets the call before memory changes. Pointers are taken
// afterwards.
void announce_write(const at::Tensor& param) {
  if (param.key_set().has(c10::DispatchKey::DeferredInit)) param.as_strided({0}, {1}).zero_();
  param.unsafeGetTensorImpl()->bump_version();
}

// The kernels' rule for masters: where a parameter is no longer its rounded master it was written
// by someone else, and wins.
void refresh_master(const Update& update) {
  if (!update.master.defined()) return;
  const auto same = update.master.to(update.param.scalar_type()).eq(update.param);
  update.master.copy_(at::where(same, update.master, update.param.to(at::kFloat)));
}

}  // namespace

ElementwiseOptimizer::ElementwiseOptimizer(std::string name, std::vector<std::string> buffers,
                                           std::vector<ParameterGroup> groups, double lr,
                                           double weight_decay)
    : name_(std::move(name)), buffer_names_(std::move(buffers)) {
  set_lr(lr);
  for (ParameterGroup& group : groups) add_group(std::move(group), weight_decay);
  std::unordered_set<std::string> names;
  std::unordered_set<const void*> tensors;
  for (const Slot& slot : slots_) {
    if (!names.insert(slot.parameter.name).second ||
        !tensors.insert(slot.parameter.tensor.unsafeGetTensorImpl()).second) {
      throw ConfigError(format("[{}] parameter '{}' is given twice, must be given once", name_,
                               slot.parameter.name));
    }
  }
}

void ElementwiseOptimizer::add_group(ParameterGroup group, double weight_decay) {
  group.weight_decay = group.weight_decay.value_or(weight_decay);
  if (!(*group.weight_decay >= 0) || !(group.lr_scale >= 0)) {
    throw ConfigError(
        format("[{}] group {} has weight_decay {} and lr_scale {}, must be at least 0", name_,
               groups_.size(), *group.weight_decay, group.lr_scale));
  }
  for (const NamedParameter& parameter : group.parameters) {
    const auto& [name, tensor, parts] = parameter;
    if (!tensor.defined() || !dtype_of(tensor)) {
      throw ConfigError(
          format("[{}] parameter '{}' is {}, must be float64, float32, float16 or bfloat16", name_,
                 name, tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined"));
    }
    if (!tensor.is_leaf()) {
      throw ConfigError(format(
          "[{}] parameter '{}' is computed from others, must be a leaf of the graph", name_, name));
    }
    slots_.push_back({.parameter = parameter, .group = groups_.size()});
  }
  groups_.push_back(std::move(group));
}

void ElementwiseOptimizer::set_lr(double lr) {
  if (!(lr >= 0)) throw ConfigError(format("[{}] lr is {}, must be at least 0", name_, lr));
  lr_ = lr;
}

void ElementwiseOptimizer::make_state(Slot& slot) const {
  const at::Tensor& param = slot.parameter.tensor;
  if (slot.has_state) return check_unchanged(slot);
  const auto options = param.options().dtype(compute_type(param));
  const auto type = buffer_type(compute_type(param));
  for (size_t i = 0; i < buffer_names_.size(); ++i) {
    slot.buffers.push_back(at::zeros_like(param, options.dtype(type)));
  }
  if (type != compute_type(param)) {
    slot.places = std::make_shared<std::vector<PlacedRuns>>(placed_runs(slot.parameter));
  }
  if (!buffer_names_.empty()) slot.step = at::zeros({}, at::kLong);
  if (is_16_bit(param)) slot.master = at::empty_like(param, options).copy_(param);
  slot.has_state = true;
}

void ElementwiseOptimizer::check_unchanged(const Slot& slot) const {
  const at::Tensor& param = slot.parameter.tensor;
  const auto check = [&](const at::Tensor& state, at::ScalarType type) {
    if (state.sizes() == param.sizes() && state.device() == param.device() &&
        state.scalar_type() == type) {
      return;
    }
    throw ConfigError(
        format("[{}] parameter '{}' is {}, must be as it was when its state was made: {}", name_,
               slot.parameter.name, describe(param), describe(state)));
  };
  const auto computed = compute_type(param);
  for (const at::Tensor& buffer : slot.buffers) check(buffer, buffer_type(computed));
  if (slot.master.defined()) check(slot.master, computed);
}

Update ElementwiseOptimizer::next_update(Slot& slot) const {
  const auto& [name, param, parts] = slot.parameter;
  const ParameterGroup& group = groups_[slot.group];
  if (param.grad().sizes() != param.sizes()) {
    throw ConfigError(format("[{}] the gradient of '{}' has shape ({}), must be ({})", name_, name,
                             join(param.grad().sizes()), join(param.sizes())));
  }
  make_state(slot);
  return {.param = param,
          .grad = param.grad(),
          .master = slot.master,
          .buffers = slot.buffers,
          .step = slot.step.defined() ? *slot.step.data_ptr<int64_t>() + 1 : 1,
          .lr = lr_ * group.lr_scale,
          .weight_decay = *group.weight_decay,
          .places = slot.places};
}

// Gradients whose update takes them as they are.
void ElementwiseOptimizer::scale_where_kernels_do_not(double factor) {
  std::vector<at::Tensor> parameters;
  for (Slot& slot : slots_) {
    if (slot.parameter.tensor.grad().defined() && !is_for_device(next_update(slot)))
      parameters.push_back(slot.parameter.tensor);
  }
  scale(gradients_of(parameters), factor);
}

void ElementwiseOptimizer::step_scaled(double factor) {
  const at::NoGradGuard no_grad;
  if (factor != 1) scale_where_kernels_do_not(factor);
  std::vector<Update> in_memory, on_device, by_operators;
  std::vector<Slot*> stepped;
  for (Slot& slot : slots_) {
    if (!slot.parameter.tensor.grad().defined()) continue;
    Update update = next_update(slot);
    if (is_for_device(update)) update.grad_factor = factor;
    stepped.push_back(&slot);
    announce_write(update.param);
    announce_read(update.grad);
    if (update.grad.layout() != at::kStrided) {
      if (update_sparse(update)) continue;
      update.grad = update.grad.to_dense();
      if (cuda::has_kernel(update)) {  // at once, so that one dense gradient at a time is in memory
        update_on_device({&update, 1});
        continue;
      }
    }
    (cuda::has_kernel(update) ? on_device
     : has_kernel(update)     ? in_memory
                              : by_operators)
        .push_back(std::move(update));
  }
  if (!on_device.empty()) update_on_device(on_device);

  Blocks blocks;
  std::vector<Kernel> kernels;
  for (Update& update : in_memory) {
    update.grad = grad_for_kernel(update);
    blocks.add(update.param.numel());
    kernels.push_back(kernel_for(update));
  }
  blocks.for_each([&](const Block& block) { kernels[block.array](block.begin, block.end); });

  for (Update& update : by_operators) {
    refresh_master(update);
    update.grad = update.grad.to(update.weight().options());
  }
  if (!by_operators.empty()) update_by_operators(by_operators);
  for (const Update& update : by_operators) {
    if (update.master.defined()) update.param.copy_(update.master);
  }
  for (Slot* slot : stepped) {
    announce_done(slot->parameter.tensor.grad());
    if (slot->step.defined()) ++*slot->step.data_ptr<int64_t>();
  }
}

std::vector<NamedTensor> ElementwiseOptimizer::state_of(const Slot& slot) const {
  std::vector<NamedTensor> entries;
  const auto add = [&](const std::string& what, const at::Tensor& tensor) {
    if (tensor.defined()) entries.push_back({slot.parameter.name + "." + what, tensor});
  };
  for (size_t i = 0; i < buffer_names_.size(); ++i) add(buffer_names_[i], slot.buffers[i]);
  add("master", slot.master);
  add("step", slot.step);
  return entries;
}

std::vector<NamedTensor> ElementwiseOptimizer::state() {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> all;
  for (Slot& slot : slots_) {
    make_state(slot);
    std::ranges::move(state_of(slot), std::back_inserter(all));
  }
  return all;
}

void ElementwiseOptimizer::load_state(std::span<const NamedTensor> entries) {
  const at::NoGradGuard no_grad;
  load_named(name_ + ".load_state", state(), entries);
}

}  // namespace lockstep::optim::detail
