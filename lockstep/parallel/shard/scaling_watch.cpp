// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/scaling_watch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

constexpr size_t kMostShards = 8;
constexpr int64_t kCheckedSamples = 32;  // of each
constexpr int64_t kLeastKnown = 8;       // samples that are not zero
constexpr double kPerUnit = 1e4;         // facts are integers: ln(factor) in units of 0.01 %

// A comparison waits for the device. A mistake is in every step, so few are looked at there.
bool is_compared(int64_t reduction, bool on_device) {
  return !on_device || reduction < 16 || reduction % 64 == 0;
}

}  // namespace

void ScalingWatch::start(const std::vector<std::unique_ptr<Flat>>& flats) {
  std::vector<const at::Tensor*> all;
  for (const auto& flat : flats) {
    // What a rank has alone it may scale alone.
    const FlatPlan& plan = flat->plan();
    if (!plan.trained || plan.shard.size() == 1 || !plan.owners.empty()) continue;
    for (const OptimizedTensor& each : flat->shard.optimized()) all.push_back(&each.tensor);
  }
  const size_t count = std::min(kMostShards, all.size());
  for (size_t i = 0; i < count; ++i) shards_.push_back(all[i * all.size() / count]);
}

// On the CPU; undefined where a gradient is missing.
at::Tensor ScalingWatch::samples() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const at::Tensor* const shard : shards_) {
    const at::Tensor& gradient = shard->grad();
    if (!gradient.defined() || gradient.is_sparse() || find_tag(gradient) != nullptr) return {};
    const at::Tensor line = gradient.detach().reshape({-1});
    const int64_t step = std::max<int64_t>(1, line.numel() / kCheckedSamples);
    parts.push_back(line.slice(0, 0, line.numel(), step).to(at::kDouble));
  }
  return parts.empty() ? at::Tensor() : at::cat(parts).cpu();
}

void ScalingWatch::after_reduction() {
  before_.reset();
  factor_.reset();
  if (shards_.empty()) return;
  if (is_compared(reductions_++, !shards_[0]->is_cpu())) before_ = samples();
}

// By which all samples were multiplied; none, where they were not.
std::optional<double> ScalingWatch::factor(const at::Tensor& now) const {
  const bool low = std::any_of(shards_.begin(), shards_.end(), [](const at::Tensor* shard) {
    return shard->grad().element_size() < 4;
  });
  const double tolerance = low ? 2e-2 : 1e-4;
  const double* const was = before_.data_ptr<double>();
  const double* const is = now.data_ptr<double>();
  double least = INFINITY, most = 0, smallest = INFINITY, largest = 0, sum_was = 0, sum_is = 0;
  int64_t known = 0;
  for (int64_t i = 0; i < before_.numel(); ++i) {
    if (was[i] == 0 && is[i] == 0) continue;
    const double ratio = is[i] / was[i];
    if (!(ratio > 0) || !std::isfinite(ratio)) return std::nullopt;
    least = std::min(least, ratio);
    most = std::max(most, ratio);
    smallest = std::min(smallest, std::abs(was[i]));
    largest = std::max(largest, std::abs(was[i]));
    sum_was += std::abs(was[i]);
    sum_is += std::abs(is[i]);
    ++known;
  }
  // Equal values stay equal under a limit for each element, too: that is no factor.
  if (known < kLeastKnown || largest < 1.5 * smallest || most - least > tolerance * most)
    return std::nullopt;
  return sum_is / sum_was;
}

void ScalingWatch::before_step() {
  if (!before_.defined()) return;
  const at::Tensor now = samples();
  if (now.defined() && now.numel() == before_.numel()) factor_ = factor(now);
  before_.reset();
}

std::array<int64_t, ScalingWatch::kFacts> ScalingWatch::facts() const {
  if (!factor_) return {0, 0, 0};
  const int64_t units = std::lround(std::clamp(std::log(*factor_), -50.0, 50.0) * kPerUnit);
  return {1, units, units * units};
}

void ScalingWatch::require_same(std::span<const int64_t, kFacts> sum) const {
  const auto count = static_cast<double>(sum[0]);
  if (count < 2) return;
  const double mean = static_cast<double>(sum[1]) / count;
  const double variance = static_cast<double>(sum[2]) / count - mean * mean;
  if (variance <= std::pow(0.005 * kPerUnit, 2)) return;
  throw Error(format(
      "[fully_shard] gradients were scaled by other factors on other ranks before the last step "
      "(on this rank by {}): torch::nn::utils::clip_grad_norm_ and optim::clip_grad_norm_ see the "
      "norm of this rank's shards alone; call clip_grad_norm_() of what fully_shard returned",
      factor_ ? format("{:.4g}", *factor_) : "an unknown factor"));
}

}  // namespace lockstep::parallel::detail
