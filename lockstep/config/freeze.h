// SPDX-License-Identifier: Apache-2.0
// Which parameters a run does not train. Private: not installed.
#pragma once

#include <set>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::config {

// The names of the model's tensors that a pattern of train.freeze matches. The model must be
// resolved. ConfigError for a pattern that matches none, with the nearest names, and where no
// tensor is left to train.
std::set<std::string> frozen_tensors(const TrainConfig& config, const ModelSpec& model);

// ConfigError where a run that resumes from the checkpoint has another optimizer, or would train
// tensors that were frozen in it, and of which it has no optimizer state.
void require_optimizer_state(const formats::Manifest& manifest, const TrainConfig& config,
                             const ModelSpec& model, const std::string& path);

}  // namespace lockstep::config
