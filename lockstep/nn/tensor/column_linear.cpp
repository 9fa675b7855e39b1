// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/tensor/column_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "lockstep/core/trace.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Where autocast is on, products are of other types than the tensors that were given; backward
// computes in the type of the gradient.
struct ColumnLinear : torch::autograd::Function<ColumnLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const Sharing& sharing) {
    context->save_for_backward({input, weight});
    save_value(*context, "sharing", sharing);
    context->saved_data["bias"] = bias.scalar_type();
    const at::Tensor whole =
        sharing.sequence_parallel ? SequenceGather(input, sharing.group).wait() : input;
    return at::linear(whole, weight, bias.numel() == 0 ? at::Tensor() : bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("linear");
    variable_list results(4);
    if (!gradients[0].defined()) return results;
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const auto sharing = saved_value<Sharing>(*context, "sharing");
    const at::ScalarType type = gradients[0].scalar_type();
    const at::Tensor gradient = gradients[0].reshape({-1, gradients[0].size(-1)});
    const bool wants_weight = context->needs_input_grad(1);

    std::optional<SequenceGather> gather;
    if (sharing.sequence_parallel && wants_weight) gather.emplace(input.to(type), sharing.group);
    std::optional<SharedInputGradient> arriving;
    if (context->needs_input_grad(0)) {
      std::vector<int64_t> sizes = gradients[0].sizes().vec();
      sizes.back() = input.size(-1);
      arriving.emplace(gradient.mm(weight.to(type)).view(sizes), sharing);
    }
    if (wants_weight) {
      const at::Tensor whole = gather ? gather->wait() : input.to(type);
      const trace::Span span("tensor", "weight gradient");
      results[1] = gradient.t().mm(whole.reshape({-1, whole.size(-1)})).to(weight.scalar_type());
    }
    if (context->needs_input_grad(2))
      results[2] = gradient.sum(0).to(context->saved_data["bias"].toScalarType());
    if (arriving) results[0] = arriving->wait().to(input.scalar_type());
    return results;
  }
};

}  // namespace

at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                         const Sharing& sharing) {
  if (!at::GradMode::is_enabled()) {
    return linear_map(
        sharing.sequence_parallel ? SequenceGather(input, sharing.group).wait() : input, weight,
        bias);
  }
  // Older versions do not take an undefined tensor.
  return ColumnLinear::apply(input, weight,
                             bias.defined() ? bias : at::empty({0}, weight.options()), sharing);
}

}  // namespace lockstep::nn
