// SPDX-License-Identifier: Apache-2.0
// AdamW: Adam with decoupled weight decay.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/optim/elementwise_optimizer.h"

namespace lockstep::optim {

// Types of the two moments. bfloat16 is rounded stochastically, by numbers that do not depend on
// how the model is shared out; float64 parameters keep float64 moments with either.
enum class MomentType { float32, bfloat16 };

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // of groups that give none
  MomentType moments = MomentType::float32;
  uint64_t seed = 0;  // of the numbers that round bfloat16 moments
};

// The arithmetic of torch::optim::AdamW, in one pass over memory. State of a parameter: exp_avg,
// exp_avg_sq, step, and a float32 master if it has 16 bits.
class AdamW final : public detail::ElementwiseOptimizer {
 public:
  explicit AdamW(std::vector<ParameterGroup> groups, AdamWOptions options = {});
  explicit AdamW(std::vector<NamedParameter> parameters, AdamWOptions options = {});
  explicit AdamW(const torch::nn::Module& module, AdamWOptions options = {});

 private:
  at::ScalarType buffer_type(at::ScalarType computed) const override;
  Kernel kernel_for(const detail::Update& update) const override;
  void update_on_device(std::span<const detail::Update> updates) const override;
  void update_by_operators(std::span<const detail::Update> updates) const override;

  AdamWOptions options_;
};

}  // namespace lockstep::optim
