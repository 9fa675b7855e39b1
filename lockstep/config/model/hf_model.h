// SPDX-License-Identifier: Apache-2.0
// Models as Hugging Face writes them: config.json and the names of tensors.
#pragma once

#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/layout/box.h"

namespace lockstep::config {

// The other way of model_spec_from_hf, which gives the same model back, but for its dropout. The
// spec must be resolved.
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
