// SPDX-License-Identifier: Apache-2.0
// What plan/ is to time, for a configuration and a built-in model. Private: not installed.
#pragma once

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/plan/step_time.h"

namespace lockstep::config {

plan::ModelShape shape_of(const ModelSpec& model);
// The configuration must be valid for `world` ranks, the model without zeros (resolve_model).
plan::Layout timed_layout(const TrainConfig& config, const ModelSpec& model, int world);

}  // namespace lockstep::config
