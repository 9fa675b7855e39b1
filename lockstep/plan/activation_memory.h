// SPDX-License-Identifier: Apache-2.0
// The most that a rank's activations take in a step: a walk over what it does. Private: not
// installed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/plan/run_description.h"
#include "lockstep/schedule/action.h"

namespace lockstep::plan {

// `keeps_gradients`: those of the first micro-batch stay where they are made, and count.
int64_t peak_of_step(const Model& model, std::span<const Stage> chunks,
                     std::span<const schedule::Action> actions, bool keeps_gradients);

}  // namespace lockstep::plan
