// SPDX-License-Identifier: Apache-2.0
// A Hugging Face folder as a checkpoint of step 0, to train on or to write text with.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/config/train_config.h"
#include "lockstep/core/dtype.h"

namespace lockstep::config {

struct HfImportOptions {
  DType dtype = DType::float32;  // a floating one
};

struct HfImported {
  std::string path = {};  // of the checkpoint
  TrainConfig config = {};
  int64_t tensors = 0;
  int64_t overflowed = 0;  // finite values that became infinite
};

// Writes DIR/step-00000000 with the model's tensors and a configuration of lockstep train; there is
// no state of an optimizer. All tensors are looked at before anything is written: those that are
// missing, unknown or of another shape are a CheckpointError that names them. ConfigError where the
// folder is of another kind, or `dir` has checkpoints already.
HfImported import_hf(const std::string& folder, const std::string& dir,
                     const HfImportOptions& options = {});

}  // namespace lockstep::config
