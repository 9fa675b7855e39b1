// SPDX-License-Identifier: Apache-2.0
// The configuration that `lockstep train` puts into its checkpoints.
#pragma once

#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::config {

// With the model resolved. CheckpointError, beginning with `path`, where the checkpoint was saved
// with something else, or with a model that no run could have.
TrainConfig saved_config(const formats::Manifest& manifest, const std::string& path);

}  // namespace lockstep::config
