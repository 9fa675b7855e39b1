// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/sample_options.h"

#include "lockstep/cli/common/options.h"
#include "lockstep/config/input_files.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

std::optional<int> parse_sample(const std::vector<std::string>& arguments, SampleOptions& options) {
  CLI::App app;
  app.add_option("--checkpoint", options.checkpoint,
                 "A checkpoint, or a folder of them: the newest")
      ->required();
  app.add_option("--prompt", options.prompt, "What the text begins with");
  app.add_option("--tokenizer", options.tokenizer,
                 "A tokenizer.json; default: what the model was trained with");
  app.add_option("--tokens", options.tokens, "How many to write")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--temperature", options.temperature,
                 "Below 1 prefers the likely; 0 always takes the most likely")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--top-k", options.top_k, "Draw from the k most likely only; 0: from all")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of the draws")->capture_default_str();
  if (const auto status = parse(app, "sample",
                                "Writes text with a model that was trained.\n"
                                "Usage: lockstep sample --checkpoint DIR --prompt TEXT [OPTIONS]\n",
                                arguments)) {
    return status;
  }
  if (options.prompt.empty()) throw ConfigError("sample: --prompt is empty, must have a character");
  options.checkpoint = config::checkpoint_at(options.checkpoint);
  return std::nullopt;
}

}  // namespace lockstep::cli
