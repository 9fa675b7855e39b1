// SPDX-License-Identifier: Apache-2.0
// The pipeline that a configuration asks for.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::config {

// Some rank has several stages, or some stage is not the whole model.
bool is_pipelined(const LayoutConfig& parallel);

schedule::ScheduleOptions schedule_options(const TrainConfig& config, int world);

// What parallel::parallelize() is to do. The configuration must be valid.
layout::ParallelConfig parallel_config(const TrainConfig& config, int world);

// Layers of each stage. Embeddings and head count as a layer each; without parallel.split they lie
// with the first and the last of equal shares of the blocks. ConfigError, with the numbers, where
// that cannot be.
std::vector<int> layers_per_stage(const LayoutConfig& parallel, int64_t blocks);

// Throws ConfigError for what does not fit, but for the number of layers. Reads the file of a
// schedule.
void validate_pipeline(const TrainConfig& config, int world);

}  // namespace lockstep::config
