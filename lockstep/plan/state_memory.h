// SPDX-License-Identifier: Apache-2.0
// What a rank has from step to step: parameters, gradients, optimizer state, and the buffers of
// those who share them. Follows parallel/data and parallel/shard. Private: not installed.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/plan/run_description.h"

namespace lockstep::plan {

// In bytes. Of the sum of these, `made_in_backward` is there only from the first backward of a step
// to its end: gradients without a bucket, or that wait to be laid into them.
struct State {
  int64_t parameters = 0, gradients = 0, optimizer = 0, buffers = 0;
  int64_t made_in_backward = 0;
};

// Of one stage on each data-parallel rank, with one rank of tensor parallelism. Where state is
// offloaded, only buffers for reproducible sums count: offload_of_shards() has the rest.
std::vector<State> states_of(const Run& run, const Stage& stage, int tp);

}  // namespace lockstep::plan
