// SPDX-License-Identifier: Apache-2.0
// Gradients that go into shards. Private: not installed.
#pragma once

#include "lockstep/parallel/flat/gradient_accumulator.h"

namespace lockstep::parallel::detail {

// The model's parameters show stand-ins for the gradients that have gone into the line; so do the
// optimizer's tensors while there are only those of each rank.
class ShardedGradients : public GradientAccumulator {
 public:
  ShardedGradients(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment);

  void begin_round(bool is_last) override;
  void before_accumulation(size_t member) const override;
  void keep_for_later(const MakeRoom& make_room, std::optional<int64_t> micro_batch) override;
  bool has_unreduced(size_t member) override;
  void on_zero(const Tag& tag, const at::Tensor& view) override;
  size_t bytes() const override;

 protected:
  ShardedGradients(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment,
                   bool keeps_line);

  void collect(size_t member, const at::Tensor& target) override;
  void fill_gap(size_t member, const at::Tensor& target) override;
  void before_launch() override;
  at::Tensor scatter_target() override;
  void deliver(std::span<const int64_t> num_ranks) override;

  // Memory for this rank's gradients from step to step, and for a reduction.
  virtual at::Tensor gradient_memory();
  virtual at::Tensor scratch(int64_t count);
  // The gradients of this round are not kept: an update takes them at once.
  virtual bool hands_over() const { return false; }
  // The gradient of an optimizer's tensor has come.
  virtual void deliver_one(const OptimizedTensor& target, const at::Tensor& arrived);
  // Members whose unreduced gradients there are, here or elsewhere.
  virtual std::vector<bool>& unreduced_members() { return filled_; }

  // What the shards have of a parameter's gradient becomes zero.
  virtual void zero_gradient(size_t member);
  // Some gradient of an earlier round is not used up.
  bool accumulates() const;
  void make_gradient();
  at::Tensor place_of(const OptimizedTensor& target) const;

  at::Tensor gradient_;  // of the shard, kept from step to step

 private:
  void notice_zeroed();
  static bool was_zeroed(const at::Tensor& gradient, const at::Tensor& stand_in, int64_t version);

  std::vector<at::Tensor> stand_ins_;  // for gradients of the model's parameters
  struct Unreduced {
    at::Tensor stand_in;  // for the gradient of an optimizer's tensor
    // Of its gradient at the end of a round that was not reduced, to see what the user does to it.
    std::optional<int64_t> version = {};
  };
  std::vector<Unreduced> unreduced_;  // per tensor of the optimizer
};

}  // namespace lockstep::parallel::detail
