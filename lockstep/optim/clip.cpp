// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/optim/exact_norm.h"
#include "lockstep/optim/gradient_passes.h"

namespace lockstep::optim {
namespace {

void require_limit(const char* operation, const char* what, double limit) {
  if (!(limit >= 0)) {
    throw ConfigError(format("[{}] {} is {}, must be at least 0", operation, what, limit));
  }
}

}  // namespace

double grad_norm(std::span<const at::Tensor> parameters, NormOptions options) {
  const auto gradients = detail::gradients_of(parameters);
  const double norm = options.exact && options.type == NormType::l2
                          ? detail::exact_norm(gradients, options.group)
                          : detail::norm_of(gradients, options.type, options.group);
  if (options.error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(format("[grad_norm] the norm of the gradients is {}, must be finite", norm));
  }
  return norm;
}

double clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                       NormOptions options) {
  require_limit("clip_grad_norm_", "max_norm", max_norm);
  const double norm = grad_norm(parameters, std::move(options));
  clip_grad_with_norm(parameters, max_norm, norm);
  return norm;
}

double clip_grad_norm_(torch::nn::Module& model, double max_norm, NormOptions options) {
  return clip_grad_norm_(model.parameters(), max_norm, std::move(options));
}

void clip_grad_with_norm(std::span<const at::Tensor> parameters, double max_norm, double norm) {
  const double factor = clip_factor(max_norm, norm);
  if (factor != 1) detail::scale(detail::gradients_of(parameters), factor);
}

double clip_factor(double max_norm, double norm) {
  require_limit("clip_grad_with_norm", "max_norm", max_norm);
  const double factor = max_norm / (norm + 1e-6);  // torch's guard against a norm of 0
  return factor >= 1 ? 1 : factor;
}

void clip_grad_value_(std::span<const at::Tensor> parameters, double max_value) {
  require_limit("clip_grad_value_", "max_value", max_value);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& gradient : detail::gradients_of(parameters)) {
    gradient.clamp_(-max_value, max_value);
    announce_done(gradient);
  }
}

}  // namespace lockstep::optim
