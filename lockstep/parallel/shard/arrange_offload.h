// SPDX-License-Identifier: Apache-2.0
// Decides what of a model rests where. Private: not installed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/flat/flat_plan.h"
#include "lockstep/parallel/tiers/offload_tiers.h"

namespace lockstep::parallel::detail {

// Fills FlatPlan::offload of all plans, which are in the order of use, and makes their memory.
// `is_embedding`: whose state 8-bit codecs leave alone. Throws ConfigError where budgets are too
// small, with the numbers, on all ranks of the group where they are on one. Collective.
std::shared_ptr<OffloadTiers> arrange_offload(
    std::vector<FlatPlan>& plans, const layout::OffloadOptions& options, const comm::Group& group,
    const std::function<bool(const std::string& name)>& is_embedding);

}  // namespace lockstep::parallel::detail
