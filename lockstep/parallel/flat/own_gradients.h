// SPDX-License-Identifier: Apache-2.0
// Gradients of parameters that stayed the model's own. Private: not installed.
#pragma once

#include "lockstep/parallel/flat/gradient_accumulator.h"

namespace lockstep::parallel::detail {

// The optimizer's gradients are the model's, and views of the line. Autograd accumulates them.
class OwnGradients final : public GradientAccumulator {
 public:
  OwnGradients(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment)
      : GradientAccumulator(parameter, shard, environment, /*keeps_line=*/true) {}

  void begin_round(bool is_last) override;
  void before_accumulation(size_t /*member*/) const override {}
  void keep_for_later(const MakeRoom& make_room, std::optional<int64_t> micro_batch) override;
  bool has_unreduced(size_t member) override;

 protected:
  void collect(size_t member, const at::Tensor& target) override;
  void fill_gap(size_t member, const at::Tensor& target) override;
  at::Tensor scatter_target() override;
  void deliver(std::span<const int64_t> num_ranks) override;
};

}  // namespace lockstep::parallel::detail
