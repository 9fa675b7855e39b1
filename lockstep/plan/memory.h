// SPDX-License-Identifier: Apache-2.0
// How much memory each rank of a training run will take, before any rank is started.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::plan {

struct Run;  // run_description.h

// Bytes on one rank. Tensors, symmetric memory and arenas; not what libraries and threads take.
struct Memory {
  int64_t parameters = 0, gradients = 0, optimizer = 0;  // parameters with the modules' buffers
  int64_t activations = 0;  // what the peak of a step has beyond the other four
  int64_t buffers = 0;      // gathered parameters, gradients and activations on their way
  // Of what is offloaded, in no sum of these. Without CUDA the device is a stretch of the same
  // memory, and what is on the host comes on top.
  int64_t on_host = 0, on_disk = 0;

  // What is there from step to step.
  int64_t state() const { return parameters + gradients + optimizer; }
  int64_t total() const { return state() + activations + buffers; }

  bool operator==(const Memory&) const = default;
};

// At the peak of a step after the first, for each rank of layout::RankMap.
std::vector<Memory> memory_per_rank(const Run& run);

}  // namespace lockstep::plan
