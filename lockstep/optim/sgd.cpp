// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/sgd.h"

#include <ATen/ATen.h>

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/optim/sgd_factors.h"
#include "lockstep/optim/tensor_memory.h"
#include "lockstep/optim/update_cuda.h"

namespace lockstep::optim {
namespace {

std::vector<std::string> buffers_of(const SGDOptions& options) {
  if (options.momentum == 0) return {};
  return {"momentum_buffer"};
}

detail::SgdFactors factors_of(const detail::Update& update, const SGDOptions& options) {
  detail::SgdFactors factors = sgd_factors(
      options, {.step = update.step, .lr = update.lr, .weight_decay = update.weight_decay});
  factors.grad_factor = update.grad_factor;
  return factors;
}

}  // namespace

detail::SgdKind sgd_kind(const SGDOptions& options) {
  if (options.momentum == 0) return detail::SgdKind::plain;
  return options.nesterov ? detail::SgdKind::nesterov : detail::SgdKind::momentum;
}

// The first step of a parameter begins its momentum with the undamped gradient, as torch does.
detail::SgdFactors sgd_factors(const SGDOptions& options, const SgdStep& now) {
  const bool first = now.step == 1;
  return {.lr = now.lr,
          .weight_decay = now.weight_decay,
          .keep = first ? 0 : options.momentum,
          .add = first ? 1 : 1 - options.dampening,
          .momentum = options.momentum};
}

void validate(const SGDOptions& options) {
  if (!(options.momentum >= 0)) {
    throw ConfigError(format("[SGD] momentum is {}, must be at least 0", options.momentum));
  }
  if (options.momentum == 0 && options.dampening != 0) {
    throw ConfigError(
        format("[SGD] dampening is {}, must be 0 without momentum", options.dampening));
  }
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    throw ConfigError(
        format("[SGD] nesterov with momentum {} and dampening {}, must have momentum above 0 and "
               "dampening 0",
               options.momentum, options.dampening));
  }
}

SGD::SGD(std::vector<ParameterGroup> groups, SGDOptions options)
    : ElementwiseOptimizer("SGD", buffers_of(options), std::move(groups), options.lr,
                           options.weight_decay),
      options_(options) {
  validate(options);
}

SGD::SGD(std::vector<NamedParameter> parameters, SGDOptions options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

SGD::SGD(const torch::nn::Module& module, SGDOptions options)
    : SGD(named_parameters(module), options) {}

SGD::Kernel SGD::kernel_for(const detail::Update& update) const {
  const auto run = detail::kernels().sgd(sgd_kind(options_), *detail::dtype_of(update.param),
                                         *detail::dtype_of(update.grad));
  return [run, operands = detail::operands_of(update), factors = factors_of(update, options_)](
             int64_t begin, int64_t end) { run(operands, factors, begin, end); };
}

void SGD::update_on_device(std::span<const detail::Update> updates) const {
  detail::cuda::sgd(updates, sgd_kind(options_),
                    [this](const detail::Update& update) { return factors_of(update, options_); });
}

void SGD::update_by_operators(std::span<const detail::Update> updates) const {
  for (const detail::Update& update : updates) {
    const auto factors = factors_of(update, options_);
    at::Tensor direction = update.grad.add(update.weight(), factors.weight_decay);
    if (options_.momentum != 0) {
      const at::Tensor& buffer = update.buffers[0];
      buffer.mul_(factors.keep).add_(direction, factors.add);
      direction = options_.nesterov ? direction.add(buffer, factors.momentum) : buffer;
    }
    update.weight().add_(direction, -factors.lr);
  }
}

bool SGD::update_sparse(const detail::Update& update) const {
  const bool only_adds = options_.momentum == 0 && update.weight_decay == 0 &&
                         !update.master.defined() && update.grad.is_sparse();
  if (only_adds) update.param.add_(update.grad, -update.lr);
  return only_adds;
}

}  // namespace lockstep::optim
