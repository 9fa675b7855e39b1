// SPDX-License-Identifier: Apache-2.0
// Models as Hugging Face writes them: config.json and the names of tensors.
#pragma once

#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/layout/box.h"

namespace lockstep::config {

// Reads a config.json of model_type gpt2 or llama, as transformers 4 and 5 write them. What our
// models do not have is a ConfigError with key and value; `path` names the file in messages.
// Dropout stays 0: it belongs to a training, not to the weights.
ModelSpec model_spec_from_hf(const std::string& config_json, const std::string& path);

// The other way. model_spec_from_hf gives the same model back, but for its dropout. The spec must
// be resolved.
std::string hf_config_json(const ModelSpec& spec);

// Rows of one of our tensors are one of theirs; `rows` of all parts of a tensor tile it. Values go
// over as they are: rotary positions are rotate-half in both.
struct HfPart {
  std::string ours;
  layout::Range rows;       // indices of dimension 0 of ours
  std::string theirs;       // gpt2: without the "transformer." that some files put before it
  bool transposed = false;  // theirs is stored [in, out]

  bool operator==(const HfPart&) const = default;
};

// Every tensor of the model, in its order. The spec must be resolved.
std::vector<HfPart> hf_parts(const ModelSpec& spec);

}  // namespace lockstep::config
