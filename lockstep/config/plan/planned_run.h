// SPDX-License-Identifier: Apache-2.0
// What plan/ is to look at, for a configuration and a built-in model.
#pragma once

#include <cstdint>

#include "lockstep/config/model/layer_cost.h"
#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/plan/run_description.h"

namespace lockstep::config {

int64_t element_bytes_of(const TrainConfig& config);  // of a parameter
int64_t moment_bytes_of(const TrainConfig& config);   // of one moment of a parameter
// Of the optimizer for each parameter: moments, and a float32 master of 16-bit parameters.
int64_t state_bytes_of(const TrainConfig& config);
// Of one layer. The configuration need not be valid but for what that layer needs.
plan::LayerCost cost_of(LayerType type, const TrainConfig& config, const ModelSpec& model);
// Data-parallel ranks that share state. A hybrid without a number: all, as if on one host.
int shards_of(const TrainConfig& config, int world);

// The configuration must be valid for `world` ranks, the model without zeros (resolve_model).
// Layers are "embed" and "positions", "blocks.0" ..., "norm" and "head". For the device of
// train.device; `auto` is CUDA where this machine has it and libtorch too.
plan::Run planned_run(const TrainConfig& config, const ModelSpec& model, int world);

// Throws ConfigError, with the numbers of that rank, where memory.max_per_device does not even hold
// parameters, gradients and optimizer state of some rank.
void require_state_fits(const TrainConfig& config, const ModelSpec& model, int world);

}  // namespace lockstep::config
