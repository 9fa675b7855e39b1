// SPDX-License-Identifier: Apache-2.0
// Gradients of offloaded models: within budgets, on the host between their uses, or handed to an
// update in backward. Private: not installed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/flat/sharded_gradients.h"
#include "lockstep/parallel/tiers/packed_gradient.h"

namespace lockstep::parallel::detail {

class OffloadedGradients final : public ShardedGradients {
 public:
  OffloadedGradients(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment);
  ~OffloadedGradients() override;

  void begin_round(bool is_last) override;
  void spill() override;
  void abandon() override;
  void wait_delivered() override;
  size_t bytes() const override;

  // Where LZ4 compresses gradients: someone is about to read or write them, and not any more.
  // Nothing elsewhere. By the thread that computes.
  void open();
  void settle();

  // ---- for the optimizer ----
  // The gradients that were sent to the host are there after this event.
  const memory::Event& moved() const { return packed_ ? settled_ : moved_; }
  // Whether a gradient is where this has put it. Others may have put another in its place.
  bool owns(const at::Tensor& gradient) const;
  // They rest on the host from the next backward on that finds none of an earlier one: so nothing
  // is moved, and who holds a gradient keeps it.
  void leave_device() { leaves_ = true; }
  // Null where they are kept as they are.
  PackedGradient* packed() const { return packed_.get(); }
  // The values of a gradient that owns() is true for, as they lie; where they are packed there is
  // memory behind them only after open().
  at::Tensor values_of(const OptimizedTensor& target) const { return place_of(target).view({-1}); }
  // Gradients go where an update that ends with the event has read them.
  void let_go(const memory::Event& read);

 protected:
  void zero_gradient(size_t member) override;
  void restore() override;
  void deliver(std::span<const int64_t> num_ranks) override;
  void give_back() override;
  at::Tensor gradient_memory() override;
  at::Tensor scatter_target() override;
  at::Tensor scratch(int64_t count) override;
  bool hands_over() const override;
  void deliver_one(const OptimizedTensor& target, const at::Tensor& arrived) override;
  std::vector<bool>& unreduced_members() override;

 private:
  OffloadTiers& tiers() const { return *plan_.offload->tiers; }
  bool rests_on_host() const { return plan_.offload->grads == layout::Tier::host; }
  void send_to_host(const at::Tensor& gradient, const at::Tensor& arrived, bool adds);
  // Whether LZ4 compresses what rests on the host.
  bool packs() const {
    return rests_on_host() && plan_.offload->grad_codec == codec::Codec::lossless;
  }
  std::unique_ptr<PackedGradient> make_packed(int64_t count, at::ScalarType dtype,
                                              const std::string& what) const;
  // Memory for what comes to the host, and its end: the driver compresses what has come.
  void begin(PackedGradient& packed);
  void end(PackedGradient& packed, bool has_begun);
  void begin_packed();
  // No other thread uses what LZ4 compresses.
  void wait_unused() const;
  at::Tensor shown_at(const OptimizedTensor& target) const;

  std::unique_ptr<PackedGradient> packed_;
  c10::Storage packed_storage_;  // its values with a tag, for all other users
  bool is_fresh_ = false;        // packed_ has nothing that is to be kept
  bool is_open_ = false;         // packed_, by open()
  bool has_begun_ = false;       // to receive gradients in packed_
  bool leaves_ = false;          // the device, as soon as there are none
  bool consumed_ = false;        // by an update, and nothing else is there to be added to
  memory::Event moved_;          // to the host
  memory::Event settled_;        // and compressed
  at::Tensor spilled_;           // the line, on the host between micro-batches
  std::unique_ptr<PackedGradient> packed_line_;  // the same, where LZ4 compresses it
  std::vector<bool> in_spilled_;                 // members that it has; empty: nothing
};

}  // namespace lockstep::parallel::detail
