// Slots on the device through which state that rests elsewhere streams, and the updates that are
// made there or on the CPU. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/optim/kernels.h"
#include "lockstep/parallel/offload/state.h"
#include "lockstep/parallel/offload/tiers.h"

namespace lockstep::parallel::detail {

// What an update is made with.
struct UpdateInput {
  at::Tensor gradient;  // 1-d
  bool gradient_on_host = false;
  memory::Event gradient_ready = {};
  optim::detail::AdamWFactors factors = {};
};

// What an update leaves behind it.
struct UpdateEvents {
  memory::Event read;     // the gradient is not needed any more
  memory::Event written;  // the parameter is where it rests
};

// The order of slices is recorded in every step; at its end the first of them are fetched for the
// next one, so that they are on the device when the gradients are known.
class UpdateRing {
 public:
  UpdateRing(std::shared_ptr<OffloadTiers> tiers, layout::UpdateSite site, RingSize size);

  // Elements of a slice: large enough for the link, small enough for the device's limit.
  static int64_t slice_elements(const layout::OffloadOptions& options, c10::Device device);
  // Bytes of a slot that holds any of the plan's slices.
  static size_t slot_bytes(const StatePlan& plan, const layout::OffloadOptions& options);
  // As many as are useful in `room` bytes of the device, a few at least.
  static size_t num_slots(const layout::OffloadOptions& options, c10::Device device,
                          size_t slot_bytes, int64_t room);

  // By the driver. Queues the update of a tensor and its state.
  UpdateEvents update(OffloadedState& state, const UpdateInput& input);
  // All tensors of the step were updated.
  void end_step();
  // Everything that was begun is where it belongs, and nothing was fetched.
  void finish();

 private:
  struct Slot {
    std::shared_ptr<std::byte> memory;
    memory::Event free = {};
    std::shared_ptr<std::byte> source = {};  // kept while it is copied from
  };
  // A slice in the order of updates.
  struct Item {
    OffloadedState* state;
    OffloadedState::Slice* slice;
    bool operator==(const Item&) const = default;
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
  void compute(const OffloadedState& state, const optim::detail::PackedSlice& slice,
               const optim::detail::AdamWFactors& factors);
  Slot& next_slot();
  void fetch(Slot& slot, const Item& item);
  // Whether the next slot was fetched for this slice.
  bool is_fetched(const Item& item);
  void bring_home();

  std::shared_ptr<OffloadTiers> tiers_;
  layout::UpdateSite site_;
  RingSize size_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
  std::vector<Return> returns_;
  std::vector<Item> now_;          // updated in this step, through slots
  std::vector<Item> fetched_;      // for the next slots, in their order
  size_t num_used_ = 0;            // of these
  at::Tensor gradient_stages_[2];  // on the host
};

}  // namespace lockstep::parallel::detail
