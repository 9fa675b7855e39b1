// SPDX-License-Identifier: Apache-2.0
// What of a flat rests where. Private: not installed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/layout/offload_ring.h"
#include "lockstep/optim/kernels/packed_update.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel::detail {

using layout::StatePlan;
using layout::StateSlice;

struct FlatOffload {
  std::shared_ptr<OffloadTiers> tiers;
  layout::Tier params = layout::Tier::device, grads = layout::Tier::device;
  codec::Codec param_codec = codec::Codec::none;  // of parameters on the host
  codec::Codec grad_codec = codec::Codec::none;   // and of gradients there
  std::vector<bool> embeddings = {};              // which of the flat's parameters are
  std::vector<StatePlan> states = {};             // in the order of Flat::optimized()
};

}  // namespace lockstep::parallel::detail
