// The files that a configuration names: opened by the ranks, and looked at before they start.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/formats/corpus.h"
#include "lockstep/formats/tokenizer.h"

namespace lockstep::config {

// The model with nothing left open: from model.path where that is set, else as configured.
ModelSpec resolve_model(const TrainConfig& config, int64_t tokenizer_vocab);

// data.tokenizer with nothing left open: "bytes", or an absolute path.
std::string tokenizer_name(const TrainConfig& config);

struct Data {
  formats::Tokenizer tokenizer;
  formats::Corpus train, validation;  // validation may be empty
};

// Opens data.path and keeps the validation data apart. ConfigError for a path that is not there,
// and where there is less than one sequence.
Data open_data(const TrainConfig& config);

// Where memory.strategy extreme keeps activations: memory.disk, else TMPDIR, else /tmp.
std::string activation_folder(const MemoryConfig& config);

// The checkpoint to begin with: none; the newest in checkpoint.dir, if any; or the one named, or
// the newest in the folder named. ConfigError where that is missing.
std::optional<std::string> find_checkpoint(const CheckpointConfig& config);

// A checkpoint, or the newest in a folder of them. ConfigError where there is none.
std::string checkpoint_at(const std::string& path);

struct CheckOptions {
  bool verify = true;  // reads every byte of the checkpoint to resume from
};

// All that can be known before ranks are started, beside what validate() says: ConfigError or
// CheckpointError in one line. Makes checkpoint.dir. Returns the model with nothing left open.
ModelSpec check_inputs(const TrainConfig& config, int world, const CheckOptions& options = {});

}  // namespace lockstep::config
