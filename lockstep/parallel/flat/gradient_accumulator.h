// SPDX-License-Identifier: Apache-2.0
// The way of a flat's gradients: from the model's parameters into a line of the flat's form, over
// the group, and to where the optimizer finds them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/comm/work.h"
#include "lockstep/parallel/flat/flat_shard.h"
#include "lockstep/parallel/flat/residence.h"
#include "lockstep/parallel/gradients/sum_tree.h"

namespace lockstep::parallel::detail {

// A round is a backward, or what reduces those before it.
class GradientAccumulator {
 public:
  virtual ~GradientAccumulator() = default;
  GradientAccumulator(const GradientAccumulator&) = delete;
  GradientAccumulator& operator=(const GradientAccumulator&) = delete;

  // Ends an outstanding reduction, so that its memory can be used; false: there is none.
  using MakeRoom = std::function<bool()>;

  // `is_last`: the gradients of the step are complete with this round.
  virtual void begin_round(bool is_last);
  // Before the next gradient of a parameter is accumulated.
  virtual void before_accumulation(size_t member) const = 0;
  // A parameter has its gradient.
  void arrive(size_t member, const MakeRoom& make_room);
  // Every parameter has had a gradient in this round.
  bool is_complete() const { return num_arrived_ == members().size(); }

  // The gradients of a micro-batch, or only those that were kept for later.
  struct Leaf {
    std::optional<int64_t> index = {};  // none: the next
    bool is_new = true;
  };
  // Begins to reduce; what is missing counts as zero.
  void launch(const MakeRoom& make_room, Leaf leaf);
  // Waits for that, and gives the line's memory back.
  void wait_reduced();
  // Leaves the gradients where the optimizer finds them: of those members for which some rank had
  // one.
  void finalize_gradients(std::span<const int64_t> num_ranks);
  // Gradients that are on their way to the optimizer have arrived.
  virtual void wait_delivered() {}

  // Ends a round that is not reduced.
  virtual void keep_for_later(const MakeRoom& make_room, std::optional<int64_t> micro_batch) = 0;
  // Every parameter has its gradient of a round that is not reduced: the line may leave.
  virtual void spill() {}
  // Forgets the round, after a backward that failed.
  virtual void abandon();

  // What such a round left of this rank's gradients.
  virtual bool has_unreduced(size_t member) = 0;
  // What stands for a gradient, with the tag, is set to zero: what zero_grad() does.
  virtual void on_zero(const Tag& /*tag*/, const at::Tensor& /*view*/) {}

  // The line stays where it is from a backward to the next one.
  bool keeps_line() const { return keeps_line_; }
  // Bytes that are always there.
  virtual size_t bytes() const { return 0; }

 protected:
  GradientAccumulator(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment,
                      bool keeps_line);

  // What the model's parameter has becomes part of the line.
  virtual void collect(size_t member, const at::Tensor& target) = 0;
  // A member without a gradient in the line, which is about to be reduced.
  virtual void fill_gap(size_t member, const at::Tensor& target) = 0;
  // What was kept elsewhere returns to the line, which has just been opened.
  virtual void restore() {}
  // Nothing is shown in place of what is about to be reduced.
  virtual void before_launch() {}
  // Where this rank's part of a reduce-scatter goes.
  virtual at::Tensor scatter_target() = 0;
  // reduced_ becomes the optimizer's gradients; then its memory is given back.
  virtual void deliver(std::span<const int64_t> num_ranks) = 0;
  virtual void give_back();

  const std::vector<Member>& members() const { return parameter_.members(); }
  at::Tensor line_view(size_t member) const;
  void open_line(const MakeRoom& make_room);
  void close_line(const memory::Event& unused = {});
  // The line, which has nothing, goes after each backward from now on.
  void stop_keeping_line();
  void fill_gaps();
  // Puts the line into the sum of micro-batches, and clears it.
  void add_to_sum(const MakeRoom& make_room, std::optional<int64_t> micro_batch);
  // The model's parameters show the line.
  void show_whole_gradients(std::span<const int64_t> num_ranks, at::ScalarType dtype);
  static bool same_memory(const at::Tensor& a, const at::Tensor& b);
  static at::Tensor dense(const at::Tensor& gradient);

  const FlatPlan& plan_;
  FlatParameter& parameter_;
  FlatShard& shard_;
  FlatEnvironment& environment_;
  bool is_last_round_ = true;
  at::Tensor line_;           // while there is one
  std::vector<bool> filled_;  // members with a gradient in the line
  at::Tensor reduced_;        // this rank's block, as it comes from the group
  SumTree sum_;
  // Of the gradients that the model's parameters were left with, to see what the user does to them;
  // none where they were left without.
  std::vector<std::optional<int64_t>> versions_;

 private:
  bool keeps_line_;
  std::vector<std::string> names_;  // of the members
  at::Tensor block_;                // the memory that the line is in
  std::vector<bool> arrived_;       // in this round
  size_t num_arrived_ = 0;
  bool in_flight_ = false;
  bool finalized_ = true;
  comm::Work reducing_;
};

}  // namespace lockstep::parallel::detail
