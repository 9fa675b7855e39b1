// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/autograd/gradient_sum.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::nn {
namespace {

// Newer versions call these hooks only for gradients that are there.
bool has_late_hooks(const auto& accumulator) {
  if constexpr (requires { accumulator.tensor_post_acc_grad_hooks(); })
    return accumulator.tensor_post_acc_grad_hooks() != nullptr;
  return false;
}

// A gradient that autograd is asked for by name does not go to grad().
bool is_plain_backward() {
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty() && !c10::GradMode::is_enabled();
}

}  // namespace

at::Tensor GradientSum::place(at::ScalarType type) const {
  using namespace torch::autograd::impl;
  // The key of parameters whose memory is there only for an operator.
  if (!weight_.defined() || !weight_.is_leaf() || weight_.scalar_type() != type ||
      weight_.key_set().has(c10::DispatchKey::DeferredInit) || !is_plain_backward())
    return {};
  const at::Tensor& sum = weight_.grad();
  if (!sum.defined() || sum.layout() != at::kStrided || sum.scalar_type() != type ||
      sum.device() != weight_.device() || sum.sizes() != weight_.sizes() || !sum.is_contiguous() ||
      sum.requires_grad())
    return {};
  const auto accumulator = try_get_grad_accumulator(weight_);
  // Hooks before an addition, those of sharded models too, prepare for it.
  if (!hooks(weight_).empty() || !accumulator || !accumulator->pre_hooks().empty() ||
      has_late_hooks(*accumulator))
    return {};
  // Autograd orders streams for gradients that are there.
  const c10::impl::VirtualGuardImpl streams(weight_.device().type());
  if (accumulator->input_metadata(0).stream() != streams.getStream(weight_.device())) return {};
  return sum;
}

}  // namespace lockstep::nn
