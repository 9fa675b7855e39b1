// SPDX-License-Identifier: Apache-2.0
// What each kind of layer takes in each part of a step, in bytes. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/plan/modules.h"

namespace lockstep::plan {

enum class LayerKind { embedding, block, head };

// Peaks count what is in use at that time on top of what other layers have: with the layer's input
// in forward, with all that it keeps and the gradient of its output in backward.
struct Profile {
  int64_t kept = 0;  // from forward to backward, its input included
  int64_t forward_peak = 0, backward_peak = 0;
  int64_t backward_peak_keeping = 0;  // where gradients of parameters stay
  int64_t weights = 0;                // bytes of them
  // Of a backward in two halves: what it has at the end of the first, before anything is released,
  // and what is left for the second.
  int64_t input_peak = 0, input_held = 0, weight_kept = 0;
  int64_t weight_peak = 0, weight_peak_keeping = 0;
};

Profile profile_of(LayerKind kind, const Sizes& sizes);

}  // namespace lockstep::plan
