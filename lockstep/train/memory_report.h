// SPDX-License-Identifier: Apache-2.0
// What a rank's memory was for when it ran out. Private: not installed.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "lockstep/optim/optimizer.h"
#include "lockstep/plan/memory.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

// The allocator's most, with symmetric memory and arenas, where it is counted; else the most that
// the system has seen.
int64_t peak_tensor_bytes(c10::Device device, const TrainedModel* model);

// Whether some allocator had no memory to give: ours under a limit, torch's for the CPU or CUDA.
bool is_out_of_memory(const std::exception& error);

// `activations` has all that is in no other column, `buffers` nothing. Optimizer state is counted
// once a step has made it.
plan::Memory measure(c10::Device device, const TrainedModel& model, optim::Optimizer& optimizer,
                     bool has_stepped);

// With train.recompute fit, the configuration says what is recomputed: what the smallest device of
// the job has memory for, or memory.max_per_device. Collective then.
config::TrainConfig fitted(config::TrainConfig config, const comm::Group& world);

struct MemoryReport {
  int rank = 0;
  plan::Memory predicted = {};
  plan::Memory measured = {};
};
// The cause, and the two side by side.
std::string out_of_memory_message(const std::exception& error, const MemoryReport& report);

}  // namespace lockstep::train
