// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/train.h"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <optional>

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/cli/train/choose_layout.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/plan/elastic.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/require.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/rank_variables.h"
#include "lockstep/launch/recovery_memory.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

bool is_elastic(const config::TrainArguments& arguments) {
  const config::RunFolderConfig& run = arguments.config.run;
  return run.min_ranks > 0 && run.min_ranks < run.ranks;
}

// What libraries read when they are loaded.
void set_variables(const config::TrainConfig& config) {
  if (!config.metrics.trace.empty() && config.metrics.trace != "auto")
    setenv("LOCKSTEP_TRACE", config.metrics.trace.c_str(), 1);
  // Without it cuBLAS may choose another order of summation from run to run.
  if (config.train.reproducible) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  // Some builds of OpenBLAS take no other word for it.
  if (config.train.reproducible || config.train.threads > 0) {
    const std::string threads = std::to_string(config.threads(1));
    setenv("OMP_NUM_THREADS", threads.c_str(), 1);
    setenv("OPENBLAS_NUM_THREADS", threads.c_str(), 1);
  }
}

// The ranks that the configuration is for: those that are there, or in an elastic job all that
// could be; for fewer the ranks choose a layout.
int full_world(const RankEnv& env) {
  const char* const full = std::getenv(launch::kMaxWorldVariable);
  return full == nullptr ? env.world_size : std::atoi(full);
}

struct Prepared {
  std::string folder = {};
  launch::StartSizes sizes = {};
};

// Looks at the files, and makes the run folder. What ranks must know of it reaches them as
// kSettings. Ranks that another launcher has started hear of a failure from rank 0, as kFailure:
// they would wait for it otherwise.
Prepared prepare(const config::TrainArguments& arguments, const RankEnv& env, int world) {
  const bool alone = env.launcher == Launcher::none;
  const auto tell = [&](const std::function<void()>& step) {
    try {
      step();
    } catch (const ConfigError& failure) {
      if (alone) throw;
      setenv(kFailure, failure.what(), 1);
    }
  };
  log::hold_lines();
  std::optional<config::RunFolder> folder;
  tell([&] { folder.emplace(arguments, env); });
  if (!folder) return {};
  config::require_layout_of_run(arguments, world);
  const auto model = config::check_inputs(folder->config(), world, {.verify = alone});
  config::require_state_fits(folder->config(), model, world);
  Prepared prepared;
  if (is_elastic(arguments)) {
    const config::ModelSpec known = config::elastic_model(folder->config());
    for (const auto& [left, size] : config::elastic_sizes(folder->config(), known))
      prepared.sizes[left] = {size.ranks, size.layout};
  }
  tell([&] { setenv(kSettings, folder->open(model).c_str(), 1); });
  prepared.folder = folder->config().run.dir;
  return prepared;
}

void validate_run(const config::TrainArguments& parsed, const RankEnv& env, bool starts_ranks) {
  const config::RunFolderConfig& run = parsed.config.run;
  const bool from_memory = run.recovery == config::Recovery::memory;
  require(run.max_restarts == 0 || starts_ranks,
          format("train: run.max_restarts {} needs -n N: who starts the ranks can start them again "
                 "(lockstep run --max-restarts)",
                 run.max_restarts));
  require(run.min_ranks == 0 || parsed.ranks || env.launcher != Launcher::none,
          format("train: run.min_ranks is {}, but run.ranks is not set; use -n {}:MAX",
                 run.min_ranks, run.min_ranks));
  require(!is_elastic(parsed) || !starts_ranks || run.max_restarts > 0,
          format("train: -n {}:{}, but run.max_restarts is 0, so that no rank is started again; "
                 "set run.max_restarts to at least 1",
                 run.min_ranks, run.ranks));
  require(!from_memory || !starts_ranks || run.max_restarts > 0,
          "train: run.recovery is memory, but run.max_restarts is 0, so that no rank is started "
          "again; set run.max_restarts to at least 1");
  require(!from_memory || starts_ranks || std::getenv(launch::kRecoveryVariable) != nullptr,
          "train: run.recovery is memory, but no launcher keeps copies; use -n N with "
          "run.max_restarts, or lockstep run --max-restarts K");
}

}  // namespace

int train(const Words& arguments) {
  const auto parsed = config::parse_train_arguments(arguments);
  if (parsed.help) {
    std::cout
        << "Trains a language model on text or on token files.\n"
           "Usage: lockstep train [-n N|MIN:MAX] [--config FILE.toml|.json] [--section.key VALUE "
           "...]\n"
           "       lockstep train --resume RUN_FOLDER [--section.key VALUE ...]\n"
           "       lockstep train --resume RUN_FOLDER --checkpoint.load model --data FILE ...\n"
           "Without -n the ranks are those of the launcher that it runs under, or one.\n"
        << config::train_help();
    return 0;
  }
  if (parsed.print_config) {
    std::cout << config::print_config(parsed);
    return 0;
  }
  const RankEnv env = RankEnv::detect();
  const bool starts_ranks = parsed.ranks && env.launcher == Launcher::none;
  if (parsed.origins.at("run.ranks") == config::Origin::flag && !starts_ranks) {
    throw ConfigError(
        format("train: -n {} under {}, which has started the ranks already; leave "
               "-n out",
               parsed.config.run.ranks, name_of(env.launcher)));
  }
  validate_run(parsed, env, starts_ranks);
  if (parsed.config.parallel.automatic) {
    if (env.launcher != Launcher::none)
      throw ConfigError(
          format("train: parallel.auto under {}, whose ranks must agree on a layout; run lockstep "
                 "plan layout and give its flags, or start the ranks with -n N",
                 name_of(env.launcher)));
    Words chosen = arguments;
    const Words layout = choose_layout(parsed, arguments, parsed.ranks.value_or(1));
    chosen.insert(chosen.end(), layout.begin(), layout.end());
    return train(chosen);
  }
  if (parsed.config.parallel.attempts > 0)
    throw ConfigError(format("parallel.try is {}, but parallel.auto is false: nothing is tried",
                             parsed.config.parallel.attempts));
  // One rank looks at the files for all. Where others are waiting for it already it does not read
  // whole checkpoints; they do when they load them.
  Prepared prepared;
  if (env.rank == 0)
    prepared = prepare(parsed, env, starts_ranks ? *parsed.ranks : full_world(env));
  set_variables(parsed.config);
  Words command{torch_path(), "train"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  if (!starts_ranks) become_program(command);
  launch::LaunchOptions options;
  options.ranks = *parsed.ranks;
  options.bare_rank_0 = true;
  options.max_restarts = parsed.config.run.max_restarts;
  if (is_elastic(parsed)) options.min_ranks = parsed.config.run.min_ranks;
  options.grow_after = std::chrono::seconds{parsed.config.run.grow_after};
  options.sizes = prepared.sizes;
  options.flight_dir = prepared.folder;
  options.ranks_save = true;
  options.stop_grace = std::chrono::seconds{parsed.config.run.grace};
  options.command = command;
  options.forks = true;
  return launch::run(options);
}

}  // namespace lockstep::cli
