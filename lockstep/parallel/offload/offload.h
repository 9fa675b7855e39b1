// SPDX-License-Identifier: Apache-2.0
// Training what does not fit on the device: parameters, gradients and optimizer state rest in host
// memory or on disk and come when they are used (ZeRO-3 with offload). docs/offload.md.
//
//   const parallel::OffloadOptions offload;
//   auto sharded = parallel::fully_shard(*model, mesh["dp"], {.offload = offload});
//   parallel::OffloadedAdamW optimizer(sharded, {.lr = 1e-4});
//   loss.backward();
//   sharded.clip_grad_norm_(1.0);
//   optimizer.step();   // returns while the update runs; the next use of a parameter waits for it
//
// OffloadedSGD is for models of which fully_shard was told so: .advanced = {.update_rule = ...}.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/layout/offload.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/shard/fully_shard.h"

namespace lockstep::parallel {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::StateCodecs;
using layout::UpdateRule;
using layout::UpdateSite;

// Counted, not computed. Bytes of this rank.
struct OffloadStats {
  // Since the model was made.
  int64_t to_device = 0, to_host = 0, from_disk = 0, to_disk = 0;
  // Now, at most, and allowed.
  int64_t device_bytes = 0, device_peak = 0, device_limit = 0;
  int64_t param_bytes = 0, param_peak = 0, param_budget = 0;
  int64_t host_bytes = 0, host_peak = 0, host_budget = 0;
  // On the CPU: what the device's stretch of memory really has behind it.
  int64_t device_resident = 0;
  // Where things rest: bytes of parameters, gradients and state by tier.
  int64_t params_on_device = 0, params_on_host = 0;
  int64_t state_on_device = 0, state_on_host = 0, state_on_disk = 0;
  // What rests outside the device, by kind: bytes as it is kept, measured, and as it would be kept
  // without its codec. Of coded parameters (bf16, int8, quantization) that is the whole float32
  // master; of gradients, what a backward leaves, of lossless ones once there was one; of state,
  // the optimizer's, once there is one. Lossless parameters and gradients have whole pages.
  struct Kept {
    int64_t bytes = 0, plain = 0;
    double ratio() const {
      return plain == 0 ? 1 : static_cast<double>(bytes) / static_cast<double>(plain);
    }
  };
  Kept params_kept = {}, grads_kept = {}, state_kept = {};
  UpdateSite site = UpdateSite::automatic;
  // Activations and temporaries on the device in the steps so far, at most, in units of 1/64 of
  // device_limit; and how often they broke the limit's margin, so that places were decided again.
  int64_t activation_peak = 0, decisions = 0;
};
// Zeros for a model that is not offloaded.
OffloadStats offload_stats(const ShardedModel& model);

// What optimizers of offloaded models share. With ClipMode::none each parameter is updated during
// backward; then step() ends the step, and lr and groups hold from before backward. Models must
// outlive it. Groups are of named_parameters() of the models; parameters that no group has are not
// updated. ConfigError where the models were arranged for another UpdateRule.
class OffloadedOptimizer : public optim::Optimizer, public optim::StagedState {
 public:
  ~OffloadedOptimizer() override;

  // Where ranks share parameters, all of them call it: they agree on what activations take.
  void step() final;
  double lr() const final;
  void set_lr(double lr) final;
  std::span<optim::ParameterGroup> groups() final;
  bool updates_in_backward() const final;
  // Copies in host memory, as optim::AdamW and optim::SGD have them.
  std::vector<optim::NamedTensor> state() final;
  void load_state(std::span<const optim::NamedTensor> entries) final;
  std::vector<optim::NamedTensor> lazy_state() final;
  void refresh(const std::string& name) final;
  void adopt(const std::string& name) final;
  // Waits for outstanding updates, and throws what went wrong in them.
  void wait();

 protected:
  struct Rule;
  OffloadedOptimizer(std::vector<ShardedModel> models, std::vector<optim::ParameterGroup> groups,
                     Rule rule);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// AdamW for offloaded models. The bits are those of optim::AdamW, unless a codec loses some.
class OffloadedAdamW final : public OffloadedOptimizer {
 public:
  OffloadedAdamW(std::vector<ShardedModel> models, std::vector<optim::ParameterGroup> groups,
                 optim::AdamWOptions options = {});
  explicit OffloadedAdamW(const ShardedModel& model, optim::AdamWOptions options = {});
};

// SGD for offloaded models, with the bits of optim::SGD, unless a codec loses some. The model's
// update_rule is sgd_momentum, or sgd where momentum is 0.
class OffloadedSGD final : public OffloadedOptimizer {
 public:
  OffloadedSGD(std::vector<ShardedModel> models, std::vector<optim::ParameterGroup> groups,
               optim::SGDOptions options = {});
  explicit OffloadedSGD(const ShardedModel& model, optim::SGDOptions options = {});
};

}  // namespace lockstep::parallel
