// SPDX-License-Identifier: Apache-2.0
// What is known of the model of a run that begins with weights, of a Hugging Face folder or of a
// checkpoint. Private: not installed.
#pragma once

#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::config {

// Completes the configuration of a run that begins with the weights of model.path, or of the
// checkpoint that checkpoint.resume names: the section model, data.tokenizer, and a train.seq_len
// within the model's positions, as far as the user has not set them. checkpoint.resume becomes the
// path of the checkpoint itself. ConfigError, with both values, for a key of the model that was set
// to another value, and where both name weights.
void complete_model(TrainConfig& config, const Origins& origins);

// The same for the section model and a checkpoint that was read already. With checkpoint.partial
// the configuration alone describes the model.
void take_model(TrainConfig& config, const Origins& origins, const formats::Manifest& manifest,
                const std::string& path);

// ConfigError, with both values of each key, unless the checkpoint was saved with this model, which
// must be resolved. Dropout may differ, and the positions of a model that computes them.
void require_same_model(const formats::Manifest& manifest, const ModelSpec& model,
                        const std::string& path);

// ConfigError: a run takes its weights from one place.
[[noreturn]] void refuse_two_sources(const std::string& model_path, const std::string& resume);

}  // namespace lockstep::config
