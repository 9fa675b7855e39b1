// SPDX-License-Identifier: Apache-2.0
// The options of `lockstep eval`, read by both halves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/infer/model_options.h"

namespace lockstep::cli {

struct EvalOptions {
  ModelOptions model = {};
  std::string data = {};      // empty: the validation data of the run
  std::string requests = {};  // JSON lines with contexts and continuations; "-": standard input
  int64_t seq_len = 0;        // 0: that of the training, or the model's positions
  int64_t stride = 0;         // 0: windows do not overlap
  int64_t rows = 0;           // windows at a time; 0: those of a micro-batch of the training
  bool json = false;
};

// Fills the options. Returns an exit status where the command ends here; throws ConfigError.
std::optional<int> parse_eval(const std::vector<std::string>& arguments, EvalOptions& options);

}  // namespace lockstep::cli
