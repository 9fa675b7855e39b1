// What of a flat rests where. Private: not installed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/layout/offload_places.h"
#include "lockstep/optim/packed_adamw.h"
#include "lockstep/parallel/offload/tiers.h"

namespace lockstep::parallel::detail {

// Part of a tensor that the optimizer updates, whose state moves by itself.
struct StateSlice {
  int64_t begin = 0, count = 0;  // elements
  layout::Tier tier = layout::Tier::device;
};

// The state of one such tensor.
struct StatePlan {
  optim::detail::PackedFormat format = {};
  bool lossless = false;  // compressed by LZ4 where it rests outside the device
  std::vector<StateSlice> slices = {};
};

struct FlatOffload {
  std::shared_ptr<OffloadTiers> tiers;
  layout::Tier params = layout::Tier::device, grads = layout::Tier::device;
  std::vector<StatePlan> states = {};  // in the order of Flat::optimized()
};

}  // namespace lockstep::parallel::detail
