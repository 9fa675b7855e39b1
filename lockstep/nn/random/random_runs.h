// SPDX-License-Identifier: Apache-2.0
// From a slice to runs of neighbouring elements, and from runs to pieces of work for the CPU's
// threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "lockstep/layout/box.h"
#include "lockstep/nn/random/random.h"
#include "lockstep/nn/random/random_kernels.h"

namespace lockstep::nn {

// Without a slice the tensor of these sizes is whole. `operation` is for the ConfigError that is
// thrown where the slice is not in its shape or does not have these sizes.
Runs runs_of(const layout::Shape& sizes, const std::optional<Slice>& slice,
             std::string_view operation);

// The fastest ones that this processor runs.
const CpuKernels& cpu_kernels();

// Fits the first-level cache together with its inputs and outputs.
constexpr int64_t kPiece = 1024;

// Calls body(place in memory, index in the whole tensor, count) on all threads, with count at most
// kPiece.
template <class Body>
void for_pieces(const Runs& runs, const Body& body) {
  constexpr int64_t kWorthAThread = 16 * kPiece;
  at::parallel_for(0, runs.numel(), kWorthAThread, [&](int64_t place, int64_t end) {
    while (place < end) {
      const int64_t run = place / runs.length, offset = place % runs.length;
      const int64_t count = std::min({kPiece, end - place, runs.length - offset});
      body(place, static_cast<uint64_t>(runs.begin(run) + offset), count);
      place += count;
    }
  });
}

}  // namespace lockstep::nn
