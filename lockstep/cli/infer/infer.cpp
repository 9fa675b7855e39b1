// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/infer.h"

#include <iostream>

#include "lockstep/cli/common/torch_program.h"
#include "lockstep/cli/infer/eval_options.h"
#include "lockstep/cli/infer/sample_options.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/launch/launcher.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

// Starts the ranks, or becomes the one that another launcher has started.
int start(const std::string& command, const Words& arguments, const ModelOptions& model) {
  const RankEnv env = RankEnv::detect();
  if (model.ranks > 0 && env.launcher != Launcher::none) {
    throw ConfigError(
        format("{}: -n {} under {}, which has started the ranks already; leave -n out", command,
               model.ranks, name_of(env.launcher)));
  }
  if (env.rank == 0 && !model.choice.empty())
    std::cerr << command << ": " << model.choice << std::endl;
  const int world = model.ranks > 0 ? model.ranks : env.world_size;
  open_model(model).config.validate(world);
  Words words{torch_path(), command};
  words.insert(words.end(), arguments.begin(), arguments.end());
  if (model.ranks <= 1) become_program(words);
  launch::LaunchOptions options;
  options.ranks = model.ranks;
  options.bare_rank_0 = true;
  options.command = words;
  options.forks = true;
  return launch::run(options);
}

}  // namespace

int sample(const Words& arguments) {
  SampleOptions options;
  if (const auto status = parse_sample(arguments, options)) return *status;
  return start("sample", arguments, options.model);
}

int eval(const Words& arguments) {
  EvalOptions options;
  if (const auto status = parse_eval(arguments, options)) return *status;
  return start("eval", arguments, options.model);
}

}  // namespace lockstep::cli
