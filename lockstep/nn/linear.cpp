// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/nn/float8/float8_linear.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/tensor/recorded_linear.h"
#include "lockstep/nn/tensor/sequence.h"

namespace lockstep::nn {

LinearImpl::LinearImpl(int64_t in, int64_t out, LinearOptions options)
    : in_(in), out_(out), options_(options) {
  reset();
}

void LinearImpl::reset() {
  weight = register_parameter("weight", at::empty({out_, in_}, options_.tensors));
  if (options_.bias) {
    bias = register_parameter("bias", at::empty({out_}, options_.tensors));
  } else {
    bias = register_parameter("bias", {}, /*requires_grad=*/false);
  }
  float8_weight_ = std::make_shared<Float8Weight>();
}

at::Tensor LinearImpl::multiply(const at::Tensor& input, LinearCall call) {
  call.adds_gradient = adds_gradient && weight.requires_grad();
  if (float8 && at::GradMode::is_enabled()) {
    call.sharing = sharing;
    return float8_linear(input, weight, call, float8_cached ? float8_weight_.get() : nullptr);
  }
  if (!is_row()) call.sharing = sharing;
  if (call.sharing || call.adds_gradient) return recorded_linear(input, weight, call);
  if (!call.added.defined()) return linear_map(input, weight, call.bias);
  return at::addmm(as_matrix(call.added), as_matrix(input), weight.t()).view(call.added.sizes());
}

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  if (!is_row()) return multiply(input, {.bias = bias});
  const at::Tensor sum = sum_outputs(multiply(input, {}), *sharing);
  return bias.defined() ? sum + bias : sum;
}

at::Tensor LinearImpl::add_to(const at::Tensor& sum, const at::Tensor& input) {
  // Of a parameter that is gathered for operators, the transpose would be another operator.
  const bool adds = input.is_cuda() && at::GradMode::is_enabled() && !sharing && !bias.defined() &&
                    input.element_size() == 2 && weight.scalar_type() == input.scalar_type() &&
                    sum.scalar_type() == input.scalar_type() &&
                    !weight.key_set().has(c10::DispatchKey::DeferredInit);
  return adds ? multiply(input, {.added = sum}) : sum + forward(input);
}

bool LinearImpl::supports(layout::TensorStyle style) const {
  return style == layout::TensorStyle::column || style == layout::TensorStyle::row ||
         style == layout::TensorStyle::vocab;
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::Linear(in=" << in_ << ", out=" << out_
         << ", bias=" << (options_.bias ? "true" : "false") << (float8 ? ", float8" : "") << ")";
}

}  // namespace lockstep::nn
