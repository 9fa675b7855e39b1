// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/norm.h"

#include <ATen/ATen.h>
#include <torch/version.h>

namespace lockstep::nn {

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

at::Tensor RmsNormImpl::forward(const at::Tensor& input) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  return at::rms_norm(input, {width_}, weight, options_.epsilon);
#else
  // The mean square of 16-bit values is taken in float32.
  const at::Tensor x = input.element_size() == 2 ? input.to(at::kFloat) : input;
  const at::Tensor scale = at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + options_.epsilon);
  return (x * scale).to(input.scalar_type()) * weight;
#endif
}

void RmsNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::RmsNorm(" << width_ << ")";
}

}  // namespace lockstep::nn
