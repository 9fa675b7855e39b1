// SPDX-License-Identifier: Apache-2.0
// The options of `lockstep sample`, read by both halves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/infer/model_options.h"

namespace lockstep::cli {

struct SampleOptions {
  ModelOptions model = {};
  std::vector<std::string> prompts = {};  // texts; those of --prompt-file follow
  std::string prompt_file = {};           // "-": standard input
  int64_t tokens = 400;
  double temperature = 0.8, top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t top_k = 40;
  int64_t seed = 1;
  int64_t samples = 1;                 // of each prompt
  std::vector<std::string> stop = {};  // texts
  int64_t logprobs = -1;               // most likely tokens to report; -1: none at all
  int64_t rows = 16;                   // texts at a time on a data-parallel rank
  bool ignore_eos = false, json = false;
  // Which of the options above the user has given.
  std::vector<std::string> given = {};
};

// Fills the options. Returns an exit status where the command ends here; throws ConfigError.
std::optional<int> parse_sample(const std::vector<std::string>& arguments, SampleOptions& options);

// The prompts of the command line and of the file.
std::vector<std::string> read_prompts(const SampleOptions& options);

// Takes what generation_config.json sets and the user has not: how tokens are drawn. Returns a line
// for people, empty where there is nothing to say. ConfigError for values that have no meaning.
std::string take_generation_config(SampleOptions& options, const std::string& file);

}  // namespace lockstep::cli
