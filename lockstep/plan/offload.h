// SPDX-License-Identifier: Apache-2.0
// Where the parameters, gradients and optimizer state of a run will rest.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/layout/offload_plan.h"
#include "lockstep/plan/run_description.h"

namespace lockstep::plan {

// One plan for each model that the rank has: the chunks of its pipeline, which share the rank's
// budgets. Its flats are the units of the layers, in order; and last, where parameters are sharded,
// "small", those that are too small to be. ConfigError where it does not fit. Budgets that are left
// open have their defaults, whatever this machine has; for update_site auto see
// layout::offload_machine.
std::vector<layout::OffloadPlan> plan_offload(const Run& run, int rank);

// A table of what rests where before the first step, and the budgets, of one rank. A run counts
// activations too once a step has shown them (docs/offload.md).
std::string to_text(std::span<const layout::OffloadPlan> plans);

}  // namespace lockstep::plan
