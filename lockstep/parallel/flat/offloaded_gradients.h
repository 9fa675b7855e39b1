// SPDX-License-Identifier: Apache-2.0
// Gradients of offloaded models: within budgets, on the host between their uses, or handed to an
// update in backward. Private: not installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/flat/sharded_gradients.h"

namespace lockstep::parallel::detail {

class OffloadedGradients final : public ShardedGradients {
 public:
  OffloadedGradients(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment);

  void begin_round(bool is_last) override;
  void spill() override;
  void abandon() override;
  void wait_delivered() override { std::exchange(moved_, {}).wait(); }

  // ---- for the optimizer ----
  // The gradients that were sent to the host are there after this event.
  const memory::Event& moved() const { return moved_; }
  // Whether a gradient is where this has put it. Others may have put another in its place.
  bool owns(const at::Tensor& gradient) const;
  // They rest on the host from the next backward on that finds none of an earlier one: so nothing
  // is moved, and who holds a gradient keeps it.
  void leave_device() { leaves_ = true; }
  // Gradients go where an update that ends with the event has read them.
  void let_go(const memory::Event& read);

 protected:
  void zero_gradient(size_t member) override;
  void restore() override;
  void deliver(std::span<const int64_t> num_ranks) override;
  void give_back() override;
  at::Tensor gradient_memory() override;
  at::Tensor scratch(int64_t count) override;
  bool hands_over() const override;
  void deliver_one(const OptimizedTensor& target, const at::Tensor& arrived) override;
  std::vector<bool>& unreduced_members() override;

 private:
  OffloadTiers& tiers() const { return *plan_.offload->tiers; }
  bool rests_on_host() const { return plan_.offload->grads == layout::Tier::host; }
  void send_to_host(const at::Tensor& gradient, const at::Tensor& arrived, bool adds);

  bool leaves_ = false;           // the device, as soon as there are none
  bool consumed_ = false;         // by an update, and nothing else is there to be added to
  memory::Event moved_;           // to the host
  at::Tensor spilled_;            // the line, on the host between micro-batches
  std::vector<bool> in_spilled_;  // members that it has; empty: nothing
};

}  // namespace lockstep::parallel::detail
