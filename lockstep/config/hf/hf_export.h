// SPDX-License-Identifier: Apache-2.0
// A checkpoint of `lockstep train` as a Hugging Face folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/core/dtype.h"

namespace lockstep::config {

struct HfExportOptions {
  std::optional<DType> dtype = std::nullopt;  // a floating one; not set: as saved
  int64_t max_file_bytes = int64_t{5} << 30;  // what is larger becomes several files
  bool replace = false;                       // another export that is in the place
};

struct HfExported {
  ModelSpec model = {};
  DType dtype = DType::float32;
  int64_t tensors = 0, files = 0, bytes = 0;
  int64_t overflowed = 0;         // finite values that became infinite
  std::string tokenizer = {};     // copied from here; empty: none was
  std::string trained_with = {};  // data.tokenizer of the run
};

// Writes config.json, the weights and, where the configuration names a tokenizer.json that is
// there, that. The token ids in config.json, and generation_config.json, are those of the model
// that the run began with. `out` appears when all is written. Holds a matrix at most.
// CheckpointError where the checkpoint is damaged, or not of the model it says; ConfigError where
// `out` is in use.
HfExported export_hf(const std::string& checkpoint, const std::string& out,
                     const HfExportOptions& options = {});

}  // namespace lockstep::config
