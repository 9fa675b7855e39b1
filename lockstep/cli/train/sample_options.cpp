// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/sample_options.h"

#include "lockstep/cli/common/options.h"
#include "lockstep/config/input_files.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

std::optional<int> parse_sample(const std::vector<std::string>& arguments, SampleOptions& options) {
  CLI::App app;
  app.add_option(
         "--checkpoint", options.checkpoint,
         "Checkpoint, or run folder or folder of checkpoints, which means the newest; RUN/best "
         "means the best")
      ->required();
  app.add_option("--prompt", options.prompt, "Text to continue");
  app.add_option("--tokenizer", options.tokenizer,
                 "Path of a tokenizer.json (default: the tokenizer of the training run)");
  app.add_option("--tokens", options.tokens, "Number of tokens to generate")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--temperature", options.temperature,
                 "Sampling temperature; values below 1 prefer likely tokens, 0 always takes the "
                 "most likely token")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--top-k", options.top_k,
                 "Sample from the k most likely tokens; 0 samples from all")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Random seed")->capture_default_str();
  if (const auto status = parse(app, "sample",
                                "Generates text with a trained model.\n"
                                "Usage: lockstep sample --checkpoint DIR --prompt TEXT [OPTIONS]\n",
                                arguments)) {
    return status;
  }
  if (options.prompt.empty()) throw ConfigError("sample: --prompt is empty, must have a character");
  const std::string name = options.checkpoint;
  options.checkpoint = config::checkpoint_at(name);
  options.choice = config::describe_choice(name, options.checkpoint);
  return std::nullopt;
}

}  // namespace lockstep::cli
