// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/optim/adamw_factors.h"
#include "lockstep/optim/tensor_memory.h"
#include "lockstep/optim/update_cuda.h"

namespace lockstep::optim {
namespace {

constexpr Requirement require_adamw("AdamW");

AdamWFactors factors_of(const detail::Update& update, const AdamWOptions& options) {
  AdamWFactors factors = adamw_factors(
      options, {.step = update.step, .lr = update.lr, .weight_decay = update.weight_decay});
  factors.grad_factor = update.grad_factor;
  return factors;
}

}  // namespace

AdamWFactors adamw_factors(const AdamWOptions& options, const AdamWStep& now) {
  const auto step = static_cast<double>(now.step);
  return {.decay = 1 - now.lr * now.weight_decay,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .step_size = now.lr / (1 - std::pow(options.beta1, step)),
          .root_scale = 1 / std::sqrt(1 - std::pow(options.beta2, step))};
}

void validate(const AdamWOptions& options) {
  require_adamw(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "in [0, 1)");
  require_adamw(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "in [0, 1)");
  require_adamw(options.eps >= 0, "eps", options.eps, "at least 0");
}

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : ElementwiseOptimizer("AdamW", {"exp_avg", "exp_avg_sq"}, std::move(groups), options.lr,
                           options.weight_decay),
      options_(options) {
  validate(options);
}

AdamW::AdamW(std::vector<NamedParameter> parameters, AdamWOptions options)
    : AdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

AdamW::AdamW(const torch::nn::Module& module, AdamWOptions options)
    : AdamW(named_parameters(module), options) {}

at::ScalarType AdamW::buffer_type(at::ScalarType computed) const {
  return options_.moments == MomentType::bfloat16 && computed == at::kFloat ? at::kBFloat16
                                                                            : computed;
}

AdamW::Kernel AdamW::kernel_for(const detail::Update& update) const {
  const DType param = *detail::dtype_of(update.param), grad = *detail::dtype_of(update.grad);
  const auto factors = factors_of(update, options_);
  if (!update.places) {
    return [run = detail::kernels().adamw(param, grad), operands = detail::operands_of(update),
            factors](int64_t begin, int64_t end) { run(operands, factors, begin, end); };
  }
  return [run = detail::kernels().rounded_adamw(param, grad), factors,
          parts = detail::rounded_parts(update, options_.seed)](int64_t begin, int64_t end) {
    auto part = std::ranges::upper_bound(parts, begin, {}, &detail::RoundedPart::end);
    for (; part != parts.end() && part->begin < end; ++part) {
      run(part->operands, factors, part->draws, std::max(begin, part->begin) - part->begin,
          std::min(end, part->end) - part->begin);
    }
  };
}

void AdamW::update_on_device(std::span<const detail::Update> updates) const {
  detail::cuda::adamw(
      updates, [this](const detail::Update& update) { return factors_of(update, options_); },
      options_.seed);
}

void AdamW::update_by_operators(std::span<const detail::Update> updates) const {
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs;
  std::vector<at::Scalar> decays, step_sizes, root_scales;
  for (const detail::Update& update : updates) {
    weights.push_back(update.weight());
    grads.push_back(update.grad);
    // A copy, where it has another type.
    exp_avgs.push_back(update.buffers[0].to(update.weight().scalar_type()));
    exp_avg_sqs.push_back(update.buffers[1].to(update.weight().scalar_type()));
    const auto factors = factors_of(update, options_);
    decays.emplace_back(factors.decay);
    step_sizes.emplace_back(-factors.step_size);
    root_scales.emplace_back(factors.root_scale);
  }
  const at::Scalar rest1(1 - options_.beta1), rest2(1 - options_.beta2);
  at::_foreach_mul_(exp_avgs, at::Scalar(options_.beta1));
  at::_foreach_add_(exp_avgs, grads, rest1);
  at::_foreach_mul_(exp_avg_sqs, at::Scalar(options_.beta2));
  at::_foreach_addcmul_(exp_avg_sqs, grads, grads, rest2);
  std::vector<at::Tensor> roots = at::_foreach_sqrt(exp_avg_sqs);
  at::_foreach_mul_(roots, root_scales);
  at::_foreach_add_(roots, at::Scalar(options_.eps));
  at::_foreach_mul_(weights, decays);
  at::_foreach_addcdiv_(weights, exp_avgs, roots, step_sizes);
  for (size_t i = 0; i < updates.size(); ++i) {
    if (updates[i].places)
      detail::store_rounded(updates[i], options_.seed, exp_avgs[i], exp_avg_sqs[i]);
  }
}

}  // namespace lockstep::optim
