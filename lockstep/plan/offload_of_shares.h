// SPDX-License-Identifier: Apache-2.0
// What plan_offload() says, for all ranks that share a model at once. Private: not installed.
#pragma once

#include <span>
#include <vector>

#include "lockstep/layout/offload_plan.h"
#include "lockstep/plan/state.h"

namespace lockstep::plan {

// Of one rank of tensor and pipeline parallelism, for each share of shares_of() a plan for each of
// its chunks.
std::vector<std::vector<layout::OffloadPlan>> offload_of_shares(const config::TrainConfig& config,
                                                                const config::ModelSpec& model,
                                                                const LocalTensors& tensors,
                                                                std::span<const Stage> chunks,
                                                                int world);

}  // namespace lockstep::plan
