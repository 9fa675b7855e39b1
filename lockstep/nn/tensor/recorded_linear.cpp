// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/tensor/recorded_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "lockstep/core/trace.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/gradient_sum.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/kernels/product_cuda.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RecordedCall {
  std::optional<Sharing> sharing;
  GradientSum sum;  // of the weight
  at::ScalarType bias_type;
};

void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b) {
  if (cuda::products_are_timed(sum.device()) &&
      cuda::timed_product(a, b, {.type = sum.scalar_type(), .added = sum, .into = sum}))
    return;
  sum.addmm_(a, b);
}

// Where autocast is on, products are of other types than the tensors that were given; backward
// computes in the type of the gradient.
struct RecordedLinear : torch::autograd::Function<RecordedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& added, const std::optional<Sharing>& sharing,
                            bool adds_gradient) {
    context->save_for_backward({input, weight});
    save_value(*context, "saved",
               RecordedCall{.sharing = sharing,
                            .sum = adds_gradient ? GradientSum(weight) : GradientSum(),
                            .bias_type = bias.scalar_type()});
    const at::Tensor whole =
        gathers_input(sharing) ? SequenceGather(input, sharing->group).wait() : input;
    if (added.numel() == 0)
      return at::linear(whole, weight, bias.numel() == 0 ? at::Tensor() : bias);
    return at::addmm(as_matrix(added), as_matrix(whole), weight.t()).view(added.sizes());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("linear");
    variable_list results(6);
    if (!gradients[0].defined()) return results;
    const auto tensors = context->get_saved_variables();
    const at::Tensor &input = tensors[0], &weight = tensors[1];
    const auto saved = saved_value<RecordedCall>(*context, "saved");
    const at::ScalarType type = gradients[0].scalar_type();
    const at::Tensor gradient = as_matrix(gradients[0]);
    const bool wants_weight = context->needs_input_grad(1);

    std::optional<SequenceGather> gather;
    if (gathers_input(saved.sharing) && wants_weight)
      gather.emplace(input.to(type), saved.sharing->group);
    std::optional<SharedInputGradient> arriving;
    if (context->needs_input_grad(0)) {
      std::vector<int64_t> sizes = gradients[0].sizes().vec();
      sizes.back() = input.size(-1);
      results[0] = gradient.mm(weight.to(type)).view(sizes);
      if (saved.sharing) arriving.emplace(results[0], *saved.sharing);
    }
    if (wants_weight) {
      const at::Tensor whole = as_matrix(gather ? gather->wait() : input.to(type));
      const trace::Span span("tensor", "weight gradient");
      if (const at::Tensor sum = saved.sum.place(type); sum.defined()) {
        add_product(sum, gradient.t(), whole);
      } else {
        results[1] = gradient.t().mm(whole).to(weight.scalar_type());
      }
    }
    if (context->needs_input_grad(2)) results[2] = gradient.sum(0).to(saved.bias_type);
    results[3] = gradients[0];
    if (arriving) results[0] = arriving->wait();
    if (results[0].defined()) results[0] = results[0].to(input.scalar_type());
    return results;
  }
};

}  // namespace

at::Tensor recorded_linear(const at::Tensor& input, const at::Tensor& weight,
                           const LinearCall& call) {
  if (!at::GradMode::is_enabled()) {
    const at::Tensor out = linear_map(
        gathers_input(call.sharing) ? SequenceGather(input, call.sharing->group).wait() : input,
        weight, call.bias);
    return call.added.defined() ? out + call.added : out;
  }
  // Older versions do not take an undefined tensor.
  const auto or_empty = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : at::empty({0}, weight.options());
  };
  return RecordedLinear::apply(input, weight, or_empty(call.bias), or_empty(call.added),
                               call.sharing, call.adds_gradient);
}

}  // namespace lockstep::nn
