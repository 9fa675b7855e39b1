// SPDX-License-Identifier: Apache-2.0
// The files that a configuration names: opened by the ranks, and looked at before they start.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/data/corpus.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/formats/manifest.h"

namespace lockstep::config {

// The model with nothing left open: from model.path where that is set, else as configured.
ModelSpec resolve_model(const TrainConfig& config, int64_t tokenizer_vocab);

using DataIdentities = std::map<std::string, data::DataIdentity>;

struct Data {
  data::Tokenizer tokenizer;
  data::Corpus train, validation;  // validation may be empty
  data::Corpus all;                // data.path
  data::Corpus all_validation;     // data.validation, where it is files of its own
  // Examples, or documents, longer than a row; and examples without an answer in it.
  int64_t cut = 0, dropped = 0;

  // What was read, by the name that a checkpoint keeps it under: "data", and "validation" where
  // that is files of its own. Reads all of it, or runs of what is long.
  DataIdentities identities(const DataConfig& config) const;
};

// A line for each, which ranks can compare.
std::string describe(const DataIdentities& identities);
// What a checkpoint keeps of them, in JSON.
std::map<std::string, std::string> state_of(const DataIdentities& identities);
// ConfigError with both where the checkpoint was trained on other data, unless
// checkpoint.other_data is set, which is a warning. Validation data may be other files, but not the
// same changed. `speaks`: one rank warns for all.
void require_same_data(const formats::Manifest& manifest, const DataIdentities& identities,
                       const TrainConfig& config, const std::string& path, bool speaks = false);

// Opens data.path and keeps the validation data apart. ConfigError for a path that is not there,
// where there is less than one sequence, and for text where model.path has no tokenizer and none is
// given.
Data open_data(const TrainConfig& config);

// Where memory.strategy extreme keeps activations: memory.disk, else TMPDIR, else /tmp.
std::string activation_folder(const MemoryConfig& config);

// The checkpoint to begin with: none; the newest in checkpoint.dir, if any; or the one named, or
// the newest in the folder named. ConfigError where that is missing.
std::optional<std::string> find_checkpoint(const CheckpointConfig& config);

// For a message about a damaged checkpoint: those in its folder that are sound, of which it reads
// every byte.
std::string other_checkpoints(const std::string& path);

// A checkpoint, or the newest in a run folder or in a folder of checkpoints; RUN/best is the best
// of a run. ConfigError where there is none.
std::string checkpoint_at(const std::string& name);
// Which one checkpoint_at() took for that name, and where the best one is, for people; empty where
// the name was that of the checkpoint.
std::string describe_choice(const std::string& name, const std::string& checkpoint);
// Its manifest. ConfigError, with those in its folder that are sound, where it is damaged. `verify`
// reads every byte.
formats::Manifest manifest_at(const std::string& path, bool verify = false);

struct CheckOptions {
  bool verify = true;  // reads every byte of the checkpoint that checkpoint.resume names
};

// All that can be known before ranks are started, in addition to validate(): ConfigError or
// CheckpointError in one line. Makes checkpoint.dir. Returns the model with nothing left open.
ModelSpec check_inputs(const TrainConfig& config, int world, const CheckOptions& options = {});

}  // namespace lockstep::config
