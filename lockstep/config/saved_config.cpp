// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/saved_config.h"

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {

TrainConfig saved_config(const formats::Manifest& manifest, const std::string& path) {
  try {
    TrainConfig config = train_config_from_json(manifest.config, "config");
    config.model = config.model.resolved(config.train.seq_len, 0);
    config.model.tensors();  // throws where a size is missing
    return config;
  } catch (const ConfigError& failure) {
    throw CheckpointError(
        format("{}: was not saved with a model of lockstep train: {}", path, failure.what()));
  }
}

}  // namespace lockstep::config
