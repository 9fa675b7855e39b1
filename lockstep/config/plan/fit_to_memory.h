// SPDX-License-Identifier: Apache-2.0
// As little computed twice as the memory of the devices allows. Private: not installed.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"

namespace lockstep::config {

// With train.recompute fit: how many blocks recompute a part or all of their activations, so that
// the predicted peak of every rank stays within the part of `limit` bytes that a prediction may
// use. As few as possible; a part before all. ConfigError if recomputing all is not enough. Without
// fit, blocks recompute what the configuration says. With train.tile auto and long rows: no tiles
// where all that is predicted fits without them. The configuration must be valid for `world` ranks.
void fit_to_memory(TrainConfig& config, const ModelSpec& model, int world, int64_t limit);

// Whether fit_to_memory() has something to choose.
bool chooses_by_memory(const TrainConfig& config);

// "recompute a part of 8 blocks and all of 4, of 24".
std::string describe_fit(const RecomputedBlocks& blocks, int64_t layers);

}  // namespace lockstep::config
