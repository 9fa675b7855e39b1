// SPDX-License-Identifier: Apache-2.0
// The options of `lockstep sample`, read by both halves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

struct SampleOptions {
  std::string checkpoint;  // a checkpoint, or a folder of them
  std::string choice;      // which one of a folder it is, for people; empty: it was named
  std::string prompt = "\n";
  std::string tokenizer;  // empty: the one that the model was trained with
  int64_t tokens = 400;
  double temperature = 0.8;
  int64_t top_k = 40;
  int64_t seed = 1;
};

// Fills the options, and `checkpoint` with the path of a complete one. Returns an exit status where
// the command ends here; throws ConfigError.
std::optional<int> parse_sample(const std::vector<std::string>& arguments, SampleOptions& options);

}  // namespace lockstep::cli
