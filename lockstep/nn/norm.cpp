// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/norm.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/kernels/fused_cuda.h"

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The input is a result, too: its gradient by other ways comes here.
struct FusedRmsNorm : torch::autograd::Function<FusedRmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const at::Tensor& weight, double epsilon) {
    const auto [out, scales] = cuda::rms_norm(input.detach(), weight.detach(), epsilon);
    context->save_for_backward({input, weight, scales});
    context->set_materialize_grads(false);
    return {out, input};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("rms_norm");
    const at::Tensor &out = gradients[0], &around = gradients[1];
    if (!out.defined()) return {around, at::Tensor(), at::Tensor()};
    const auto saved = context->get_saved_variables();
    const auto found =
        cuda::rms_norm_backward(saved[0], saved[1], saved[2], out, around,
                                context->needs_input_grad(0), context->needs_input_grad(1));
    return {found.x, found.weight, at::Tensor()};
  }
};

}  // namespace

LayerNormImpl::LayerNormImpl(int64_t width, NormOptions options)
    : width_(width), options_(options) {
  reset();
}

void LayerNormImpl::reset() {
  weight = register_parameter("weight", at::ones({width_}, options_.tensors));
  bias = register_parameter("bias", at::zeros({width_}, options_.tensors));
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  return at::layer_norm(input, {width_}, weight, bias, options_.epsilon);
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::LayerNorm(" << width_ << ")";
}

RmsNormImpl::RmsNormImpl(int64_t width, NormOptions options) : width_(width), options_(options) {
  reset();
}

void RmsNormImpl::reset() {
  weight = register_parameter("weight", at::ones({width_}, options_.tensors));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& input) { return fork(input).out; }

RmsNormImpl::Fork RmsNormImpl::fork(const at::Tensor& input) {
  if (cuda::has_rms_norm(input, weight)) {
    const auto found = FusedRmsNorm::apply(input, weight, options_.epsilon);
    return {found[0], found[1]};
  }
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  return {at::rms_norm(input, {width_}, weight, options_.epsilon), input};
#else
  // The mean square of 16-bit values is taken in float32.
  const at::Tensor x = input.element_size() == 2 ? input.to(at::kFloat) : input;
  const at::Tensor scale = at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + options_.epsilon);
  return {(x * scale).to(input.scalar_type()) * weight, input};
#endif
}

void RmsNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::RmsNorm(" << width_ << ")";
}

}  // namespace lockstep::nn
