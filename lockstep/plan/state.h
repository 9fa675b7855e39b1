// SPDX-License-Identifier: Apache-2.0
// What a rank has from step to step: parameters, gradients, optimizer state, and the buffers of
// those who share them. Follows parallel/data and parallel/shard. Private: not installed.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/layout/placement.h"

namespace lockstep::plan {

int64_t element_bytes_of(const config::TrainConfig& config);

// Tensors of one tensor-parallel rank, by layer.
struct LocalTensors {
  std::vector<layout::Shape> embed, positions, block, norm, head;
};
LocalTensors local_tensors(const config::ModelSpec& model, int tp, int rank);

// The layers of a stage.
struct Stage {
  bool embedding = true, head = true;
  int64_t blocks = 0;
  int64_t first_block = 0;
};
// All stages of the model, first to last; one where there is no pipeline.
std::vector<Stage> stages_of(const config::TrainConfig& config, const config::ModelSpec& model);

// Ranks of the data-parallel group that share parameters out among them. Those of a host, where no
// number is given: all.
int shares_of(const config::TrainConfig& config, int world);

// In bytes. Of the sum of these, `made_in_backward` is there only from the first backward of a step
// to its end: gradients that nobody has buckets for, or that wait to be laid into them.
struct State {
  int64_t parameters = 0, gradients = 0, optimizer = 0, buffers = 0;
  int64_t made_in_backward = 0;
};

// Of one stage on each data-parallel rank. Where state is offloaded, only buffers for reproducible
// sums count: offload_of_shares() has the rest.
std::vector<State> states_of(const config::TrainConfig& config, const config::ModelSpec& model,
                             const LocalTensors& tensors, const Stage& stage, int world);

}  // namespace lockstep::plan
