// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/train_rank.h"

#include <csignal>
#include <cstdlib>

#include "lockstep/cli/train/train.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/flight/stacks.h"
#include "lockstep/memory/meter.h"
#include "lockstep/train/stop_request.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {
namespace {

// Before the settings of rank 0: a restart that has a checkpoint of its own, and a start.
constexpr char kGoesOn = '+', kBegins = ' ';

constexpr int kStopped = 75;  // EX_TEMPFAIL: saved, start me again

// Puts files where rank 0 has decided, and its log into the run folder. Its failure is every
// rank's.
void use_run_folder(config::TrainConfig& config, const comm::Group& group) {
  const auto settings = comm::run_on_all_ranks("run.dir", group, [&]() -> std::string {
    if (group.rank() != 0) return {};
    if (const char* const failure = std::getenv(kFailure)) throw ConfigError(failure);
    const char* const text = std::getenv(kSettings);
    if (text == nullptr) throw ConfigError("train: ranks are started by lockstep train");
    config::adopt(config, text);
    log::copy_to(config.run.dir.empty() ? "" : config.run.dir + "/log.txt");
    const bool again =
        RankEnv::detect().restart_count > 0 && config::resume_own_checkpoints(config);
    return (again ? kGoesOn : kBegins) + std::string(text);
  });
  if (group.rank() == 0) return;
  config::adopt(config, settings[0].substr(1));
  if (settings[0][0] == kGoesOn) {
    config.checkpoint.resume = "auto";
    config.checkpoint.load = config::LoadWhat::all;
  }
  log::copy_to("");
}

}  // namespace

int train_rank(const std::vector<std::string>& arguments) {
  // For the trainer, which is not there yet when a signal may come. To the end of the process: a
  // second signal does not spoil its exit code.
  [[maybe_unused]] static const auto* const stop = new train::StopRequest;
  std::signal(SIGPIPE, SIG_IGN);  // training continues without a reader
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with its name
  log::hold_lines();
  config::TrainConfig config = config::parse_train_arguments(arguments).config;
  if (config.metrics.trace == "auto") trace::expect_folder();
  const comm::Group group = comm::init({.backend = config.comm.backend,
                                        .strategy = config.comm.strategy,
                                        .timeout = config.timeout()});
  comm::require_same(config::common_lines(config), group);
  use_run_folder(config, group);
  if (!config.run.dir.empty()) flight::set_folder(config.run.dir + "/flight");
  flight::dump_on_signal(SIGUSR2);
  config.validate(group.size());
  if (!config.metrics.trace.empty()) trace::write_to(config.metrics.trace);
  memory::Meter::install();  // the report compares the memory of tensors with the plan
  try {
    train::Trainer trainer(config, group);
    return trainer.run() == train::TrainingResult::stopped ? kStopped : 0;
  } catch (const std::exception& failure) {
    log::copy_line(std::string("lockstep: ") + failure.what());
    throw;
  }
}

}  // namespace lockstep::cli
