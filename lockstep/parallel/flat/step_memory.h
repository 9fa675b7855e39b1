// SPDX-License-Identifier: Apache-2.0
// Memory that sharded training takes and gives back in every step. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/memory/arena.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel::detail {

// For gathered parameters: an arena on the CPU, torch's allocator on a device.
class GatherMemory {
 public:
  // `capacity`: bytes of all parameters, gathered at once.
  GatherMemory(size_t capacity, c10::Device device) : arena_(capacity), device_(device) {}

  // The largest that will be taken again and again.
  void expect(size_t largest) { largest_ = largest; }

  std::shared_ptr<void> take(size_t bytes, c10::Device device);
  size_t used() const { return arena_.stats().used + counted_->used; }
  // What is occupied, used or not.
  size_t occupied() const { return arena_.stats().resident + counted_->peak; }
  // How often more had to be had than ever before.
  size_t growths() const { return arena_.stats().growths + counted_->growths; }

 private:
  memory::Arena arena_;
  size_t largest_ = 0;
  c10::Device device_;
  std::shared_ptr<memory::ArenaStats> counted_ = std::make_shared<memory::ArenaStats>();
};

// For gradients on their way to the shards: memory that the group can reach, in as few blocks as
// the outstanding reductions need.
class GradientMemory {
 public:
  // Where there are tiers, within their budgets.
  GradientMemory(comm::Group group, c10::Device device, std::shared_ptr<OffloadTiers> tiers)
      : group_(std::move(group)), device_(device), tiers_(std::move(tiers)) {}

  // That are taken again and again.
  static size_t num_blocks(const OffloadTiers* tiers) {
    return static_cast<size_t>(
        layout::num_gradient_blocks(tiers != nullptr && tiers->updates_in_backward(),
                                    tiers != nullptr && tiers->device.is_cuda()));
  }

  // The largest that will be taken again and again.
  void expect(size_t largest) { largest_ = std::max(largest_, largest); }

  // A block of at least `bytes`, until the last copy of the tensor goes. `make_room` is called as
  // long as there is no free one: it ends an outstanding reduction, or says that there is none.
  at::Tensor take(size_t bytes, const std::function<bool()>& make_room);
  // Makes the blocks that will be taken again and again.
  void reserve();
  // The next use of the block comes after the event.
  void busy_until(const at::Tensor& block, const memory::Event& event);
  // Lets go of free blocks beyond those that outstanding reductions need.
  void trim();
  // One that is kept until its owner releases it, and is then dropped.
  at::Tensor keep(size_t bytes);
  void let_go(const at::Tensor& kept) { occupied_ -= kept.nbytes(); }

  size_t occupied() const { return occupied_; }
  size_t allocations() const { return allocations_; }

 private:
  at::Tensor allocate(size_t bytes);

  comm::Group group_;
  c10::Device device_;
  std::shared_ptr<OffloadTiers> tiers_;
  struct Block {
    at::Tensor memory;
    memory::Event busy = {};
    size_t since = 0;  // the one that has been busy longest is taken first
  };
  std::vector<Block> blocks_;
  size_t returns_ = 0;
  std::vector<memory::Budget::Share> shares_;
  size_t largest_ = 0;
  size_t occupied_ = 0;
  size_t allocations_ = 0;
};

}  // namespace lockstep::parallel::detail
