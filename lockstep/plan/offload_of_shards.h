// SPDX-License-Identifier: Apache-2.0
// What plan_offload() says, for all ranks that share a model at once. Private: not installed.
#pragma once

#include <span>
#include <vector>

#include "lockstep/layout/offload_plan.h"
#include "lockstep/plan/run_description.h"

namespace lockstep::plan {

// Of one rank of tensor and pipeline parallelism, for each of Run::shards a plan for each of its
// chunks.
std::vector<std::vector<layout::OffloadPlan>> offload_of_shards(const Run& run,
                                                                std::span<const Stage> chunks,
                                                                int tp);

}  // namespace lockstep::plan
