// SPDX-License-Identifier: Apache-2.0
// The most that a rank's activations take in a step: a walk over what it does. Private: not
// installed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/plan/profile.h"
#include "lockstep/plan/state.h"
#include "lockstep/schedule/action.h"

namespace lockstep::plan {

struct StepFacts {
  Profile embedding, block, head;
  bool keeps_gradients = false;  // those of the first micro-batch stay where they are made
  int64_t tied = 0;              // bytes of a table that embeddings and head share on a rank
};

// With gradients, where they are kept.
int64_t peak_of_step(std::span<const Stage> chunks, std::span<const schedule::Action> actions,
                     const StepFacts& facts);

}  // namespace lockstep::plan
