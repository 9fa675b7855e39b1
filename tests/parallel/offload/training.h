// SPDX-License-Identifier: Apache-2.0
// Training with and without offload, to be compared bit by bit.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "tests/support/models.h"

namespace lockstep::test {

// Computes in float32, whatever its parameters are: not every CPU multiplies matrices of bfloat16.
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(int64_t width)
      : weight(register_parameter("weight", at::empty({width, width}))),
        bias(register_parameter("bias", at::empty({width}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::tanh(at::linear(x, weight.to(at::kFloat), bias.to(at::kFloat)));
  }

  at::Tensor weight, bias;
};
TORCH_MODULE(Layer);

// Square layers, wide enough that state has several slices.
class TowerImpl : public torch::nn::Module {
 public:
  TowerImpl(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i)
      layers_.push_back(register_module("layer" + std::to_string(i), Layer(width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers_) x = layer(x);
    return x;
  }

 private:
  std::vector<Layer> layers_;
};
TORCH_MODULE(Tower);

struct OffloadRun {
  int64_t layers = 4, width = 112;
  int steps = 5, accumulation = 1;
  at::ScalarType dtype = at::kFloat;
  std::optional<optim::SGDOptions> sgd = std::nullopt;  // instead of AdamW
  double clip = 0.05;                                   // 0: not at all
  bool measures = false;                                // the norm, where gradients are not clipped
  bool use_orig_params = true;
  bool zeroes = true;                                             // gradients, before each step
  std::function<int64_t(int step)> rows = [](int) { return 6; };  // of a batch
  // Called before and after each step of the optimizer.
  std::function<void(int step, const parallel::ShardedModel&, optim::Optimizer&)> before = {},
                                                                                  after = {};
};

struct OffloadCurve {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> weights;
  parallel::OffloadStats stats = {};

  bool operator==(const OffloadCurve& other) const {
    if (losses != other.losses || norms != other.norms || weights.size() != other.weights.size())
      return false;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!weights[i].equal(other.weights[i])) return false;
    }
    return true;
  }
};

// AdamW, or SGD where there are options for it.
inline std::unique_ptr<optim::Optimizer> make_optimizer(
    const parallel::ShardedModel& sharded, bool offloaded,
    const std::optional<optim::SGDOptions>& sgd) {
  const optim::AdamWOptions adamw{.lr = 3e-3, .weight_decay = 0.1};
  if (offloaded && sgd) return std::make_unique<parallel::OffloadedSGD>(sharded, *sgd);
  if (offloaded) return std::make_unique<parallel::OffloadedAdamW>(sharded, adamw);
  if (sgd) return std::make_unique<optim::SGD>(sharded.named_parameters(), *sgd);
  return std::make_unique<optim::AdamW>(sharded.named_parameters(), adamw);
}

inline parallel::Offload offload_for(std::optional<parallel::OffloadOptions> offload,
                                     const std::optional<optim::SGDOptions>& sgd) {
  if (!offload) return parallel::NoOffload{};
  if (sgd) {
    offload->advanced.update_rule =
        sgd->momentum > 0 ? layout::UpdateRule::sgd_momentum : layout::UpdateRule::sgd;
  }
  return *offload;
}

inline OffloadCurve train_offloaded(const comm::Group& group, const OffloadRun& run,
                                    std::optional<parallel::OffloadOptions> offload) {
  Tower model(run.layers, run.width);
  fill_parameters(*model, 3);
  model->to(run.dtype);
  const parallel::FullyShardOptions options{.units = parallel::ByType{{"Layer"}},
                                            .min_num_params = 100,
                                            .use_orig_params = run.use_orig_params,
                                            .offload = offload_for(offload, run.sgd)};
  auto sharded = parallel::fully_shard(*model, group, options);
  const auto optimizer = make_optimizer(sharded, offload.has_value(), run.sgd);
  OffloadCurve curve;
  for (int step = 0; step < run.steps; ++step) {
    const int64_t rows = run.rows(step);
    const at::Tensor numbers = at::arange(rows * run.width, at::kFloat).view({rows, run.width});
    double sum = 0;
    for (int micro = 0; micro < run.accumulation; ++micro) {
      const double shift =
          1 + 0.01 * ((step * run.accumulation + micro) * group.size() + group.rank());
      const at::Tensor input = at::sin(numbers * shift);
      std::optional<parallel::NoSyncShards> no_sync;
      if (micro + 1 < run.accumulation) no_sync.emplace(sharded.no_sync());
      const at::Tensor loss = (model->forward(input) - at::cos(numbers)).square().mean();
      (loss / run.accumulation).backward();
      sum += loss.item<double>();
    }
    curve.norms.push_back(run.clip > 0   ? sharded.clip_grad_norm_(run.clip)
                          : run.measures ? sharded.grad_norm()
                                         : 0);
    if (run.before) run.before(step, sharded, *optimizer);
    optimizer->step();
    if (run.zeroes) optimizer->zero_grad();
    curve.losses.push_back(sum);
    if (run.after) run.after(step, sharded, *optimizer);
  }
  for (const auto& [name, tensor] : sharded.full_state_dict()) curve.weights.push_back(tensor);
  curve.stats = parallel::offload_stats(sharded);
  return curve;
}

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// On a device that is smaller than the model.
inline layout::OffloadOptions everything(layout::UpdateSite site = layout::UpdateSite::device,
                                         layout::ClipMode clip = layout::ClipMode::exact) {
  return {.param_budget = 512 * kKiB,
          .host_budget = 64 * kMiB,
          .device_limit = kMiB,
          .advanced = {.host_limit = 64 * kMiB,
                       .strategy = layout::OffloadStrategy::extreme,
                       .update_site = site,
                       .clip_mode = clip}};
}

inline layout::OffloadOptions kept_as(const char* codecs, layout::UpdateSite site) {
  layout::OffloadOptions options = everything(site);
  options.codec = layout::parse_state_codecs(codecs);
  return options;
}

// Some of the elements, so that others keep what their masters have beyond them.
inline void write_some(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor part = tensor.view({-1}).slice(0, 0, tensor.numel(), 3);
  part.copy_(part * 0.75 + 0.01);
}

inline void write_shards(const parallel::ShardedModel& model) {
  for (const auto& parameter : model.named_parameters()) write_some(parameter.tensor);
}

inline void expect_same(int ranks, const OffloadRun& run, const layout::OffloadOptions& offload,
                        const std::string& what) {
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const OffloadCurve plain = train_offloaded(group, run, {});
    const OffloadCurve moved = train_offloaded(group, run, offload);
    ASSERT_EQ(plain.losses, moved.losses) << what << ", " << ranks << " ranks";
    EXPECT_TRUE(plain == moved) << what << ", " << ranks << " ranks";
    EXPECT_LE(moved.stats.device_peak, moved.stats.device_limit);
    EXPECT_TRUE(!offload.params || moved.stats.param_peak <= moved.stats.param_budget);
    EXPECT_LE(moved.stats.host_peak, moved.stats.host_budget);
    const bool has_state =
        !run.sgd || run.sgd->momentum > 0 || c10::elementSize(run.dtype) == sizeof(uint16_t);
    if (has_state && offload.optimizer &&
        offload.advanced.strategy == layout::OffloadStrategy::extreme) {
      EXPECT_GT(moved.stats.state_on_host, 0) << "nothing had to leave the device";
    }
  });
}

}  // namespace lockstep::test
