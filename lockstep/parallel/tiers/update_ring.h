// SPDX-License-Identifier: Apache-2.0
// A ring of device memory through which state that rests elsewhere streams, and the updates that
// are made there or on the CPU. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "lockstep/optim/kernels/packed_update.h"
#include "lockstep/parallel/tiers/offload_tiers.h"
#include "lockstep/parallel/tiers/offloaded_state.h"

namespace lockstep::parallel::detail {

using optim::PackedFormat;

// What an update is made with.
struct UpdateInput {
  at::Tensor gradient;  // 1-d; of the planned type, or of float32 where that is float16
  bool gradient_on_host = false;
  memory::Event gradient_ready = {};
  optim::PackedFactors factors = {};
};

// What an update leaves behind it.
struct UpdateEvents {
  memory::Event read;     // the gradient is not needed any more
  memory::Event written;  // the parameter is where it rests
};

// The order of slices is recorded in every step. In the next one as many as there is room for are
// fetched before their gradients are known, from its beginning on.
class UpdateRing {
 public:
  UpdateRing(std::shared_ptr<OffloadTiers> tiers, layout::UpdateSite site, size_t bytes);
  ~UpdateRing() { tiers_->wait_for_updates(); }  // which use its memory
  UpdateRing(const UpdateRing&) = delete;
  UpdateRing& operator=(const UpdateRing&) = delete;

  // By the driver. Queues the update of a tensor and its state. The gradient must live until the
  // events have passed; where this throws, nothing that was queued uses it any more.
  UpdateEvents update(OffloadedState& state, const UpdateInput& input);
  // All tensors of the step were updated.
  void end_step();
  // Everything that was begun is where it belongs, and nothing was fetched.
  void finish();

 private:
  // A slice in the order of updates.
  struct Item {
    OffloadedState* state;
    OffloadedState::Slice* slice;
    bool operator==(const Item&) const = default;
  };
  // What a slice has of the ring. Positions only grow: the ring's size later is the same memory.
  struct Slot {
    Item item;
    size_t begin;
    std::byte* memory;
    std::shared_ptr<std::byte> source = {};  // kept while it is copied from
    memory::Event arrived = {};
  };
  struct Used {
    size_t begin;
    memory::Event free;
  };
  // A slice on its way back to the disk.
  struct Return {
    OffloadedState* state;
    OffloadedState::Slice* slice;
    std::shared_ptr<std::byte> memory;
    memory::Event arrived;
  };

  UpdateEvents update_on_device(OffloadedState& state, OffloadedState::Slice& slice,
                                const UpdateInput& input);
  UpdateEvents update_on_cpu(OffloadedState& state, const UpdateInput& input);
  void compute(const OffloadedState& state, const optim::PackedSlice& slice,
               const UpdateInput& input);
  // A coded parameter's place in the ring, and copies between the two by the queue.
  static codec::CodedArray coded_at(const PackedFormat& format, std::byte* memory,
                                    int64_t elements);
  enum class Way { in, home };
  void copy_coded(memory::Queue& queue, Way way, const OffloadedState& state,
                  const StateSlice& place, std::byte* memory);
  // Where the next slice of so many bytes begins.
  size_t next_begin(size_t bytes) const;
  size_t next_round() const { return (next_ + size_ - 1) / size_ * size_; }
  // Into fetched_, which keeps what is copied from.
  void fetch(const Item& item);
  // Those that come next, as long as they do not take the place of one that was not used yet.
  void fetch_ahead();
  void drop_fetched();
  // The one that was fetched for this slice, or is now: the first of fetched_.
  Slot& slot_for(const Item& item);
  UpdateEvents update_all(OffloadedState& state, const UpdateInput& input);
  void bring_home(const OffloadedState::Slice& wanted);

  std::shared_ptr<OffloadTiers> tiers_;
  layout::UpdateSite site_;
  size_t size_;
  std::shared_ptr<std::byte> memory_;
  size_t next_ = 0;           // position
  std::deque<Used> used_;     // behind these
  std::deque<Slot> fetched_;  // come these
  std::vector<Item> order_;   // of the step before
  size_t num_fetched_ = 0;    // of these
  std::vector<Item> now_;     // updated in this step
  std::vector<Return> returns_;
  at::Tensor gradient_stages_[2];  // on the host
};

}  // namespace lockstep::parallel::detail
