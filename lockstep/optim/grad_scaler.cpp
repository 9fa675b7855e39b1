// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/grad_scaler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/optim/gradient_passes.h"
#include "lockstep/optim/parameters/named_state.h"

namespace lockstep::optim {
namespace {

constexpr Requirement require_scaler("GradScaler");

}  // namespace

GradScaler::GradScaler(comm::Group group, GradScalerOptions options)
    : group_(std::move(group)),
      options_(options),
      scale_(at::full({}, options.init_scale, at::kDouble)),
      growth_tracker_(at::zeros({}, at::kLong)) {
  require_scaler(options.init_scale > 0, "init_scale", options.init_scale, "above 0");
  require_scaler(options.growth_factor > 1, "growth_factor", options.growth_factor, "above 1");
  require_scaler(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
                 options.backoff_factor, "between 0 and 1");
  require_scaler(options.growth_interval >= 1, "growth_interval",
                 static_cast<double>(options.growth_interval), "at least 1");
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return loss * scale(); }

double GradScaler::scale() const { return *scale_.data_ptr<double>(); }

void GradScaler::unscale(Optimizer& optimizer) {
  if (stages_.contains(&optimizer)) {
    throw ConfigError(
        "[GradScaler] gradients were unscaled already, must be once for an optimizer between "
        "updates");
  }
  if (optimizer.updates_in_backward()) {
    throw ConfigError(
        "[GradScaler] the optimizer updates parameters in backward, with gradients that are still "
        "scaled: use offload.clip_mode exact, or no scaler");
  }
  const auto parameters = optimizer.parameters();
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined() && gradient.scalar_type() == at::kHalf) {
      gradient = gradient.to(at::kFloat);
    }
  }
  const double largest = detail::scale_and_measure(detail::gradients_of(parameters), 1 / scale());
  stages_[&optimizer].overflowed = detail::any_rank(!std::isfinite(largest), group_);
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!stages_.contains(&optimizer)) unscale(optimizer);
  Stage& stage = stages_.at(&optimizer);
  if (stage.stepped) {
    throw ConfigError("[GradScaler] step was called twice, must be once between updates");
  }
  stage.stepped = true;
  if (stage.overflowed) {
    ++skipped_steps_;
  } else {
    optimizer.step();
  }
  return !stage.overflowed;
}

void GradScaler::update() {
  if (stages_.empty()) {
    throw ConfigError("[GradScaler] update without gradients, must come after unscale or step");
  }
  const bool overflowed =
      std::ranges::any_of(stages_, [](const auto& entry) { return entry.second.overflowed; });
  stages_.clear();
  double& scale = *scale_.data_ptr<double>();
  int64_t& tracker = *growth_tracker_.data_ptr<int64_t>();
  if (overflowed) {
    scale *= options_.backoff_factor;
    tracker = 0;
  } else if (++tracker >= options_.growth_interval) {
    const double grown = scale * options_.growth_factor;
    if (grown <= std::numeric_limits<float>::max()) scale = grown;  // what a loss can be scaled by
    tracker = 0;
  }
}

std::vector<NamedTensor> GradScaler::state() {
  return {{"grad_scaler.scale", scale_}, {"grad_scaler.growth_tracker", growth_tracker_}};
}

void GradScaler::load_state(std::span<const NamedTensor> entries) {
  load_named("GradScaler.load_state", state(), entries);
}

}  // namespace lockstep::optim
