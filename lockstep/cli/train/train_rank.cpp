// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/train_rank.h"

#include <torch/version.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <sstream>

#include "lockstep/cli/train/train.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/plan/elastic.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/flight/stacks.h"
#include "lockstep/io/json.h"
#include "lockstep/io/line_file.h"
#include "lockstep/launch/rank_variables.h"
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

// The layout of the ranks that are there, in a job that continues with fewer.
void use_elastic_layout(config::TrainConfig& config, int world) {
  const char* const full = std::getenv(launch::kMaxWorldVariable);
  if (full == nullptr) return;
  auto layout =
      config::elastic_layout(config, config::elastic_model(config), std::atoi(full), world);
  if (!layout)
    throw ConfigError(format("no layout of {} fits {}", counted(std::atoi(full), "rank"),
                             counted(world, "rank")));
  config = std::move(layout->config);
}

// For the report: with how many ranks the run continues.
void note_change(const config::TrainConfig& config, const comm::Group& group) {
  const char* const change = std::getenv(launch::kChangeVariable);
  if (change == nullptr || group.rank() != 0 || config.run.dir.empty()) return;
  std::istringstream words(change);
  int64_t step = 0, from = 0;
  std::string lost;
  words >> step >> from >> std::ws;
  std::getline(words, lost);
  io::LineFile(config.run.dir + "/events.jsonl")
      .write(io::OrderedJson{{"event", "world"},
                             {"step", std::max<int64_t>(0, step)},
                             {"time", static_cast<double>(std::time(nullptr))},
                             {"ranks", group.size()},
                             {"from", from},
                             {"lost", lost},
                             {"layout", config::layout_text(config, group.size())}}
                 .dump());
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
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
  // What nearly fills a GPU must not fail because its free memory is in pieces. torch's allocator
  // reads this once.
  if (config.train.fit) setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", 0);
#endif
  const comm::Group group = comm::init({.backend = config.comm.backend,
                                        .strategy = config.comm.strategy,
                                        .timeout = config.timeout()});
  comm::require_same(config::common_lines(config), group);
  use_run_folder(config, group);
  if (!config.run.dir.empty()) flight::set_folder(config.run.dir + "/flight");
  flight::dump_on_signal(SIGUSR2);
  use_elastic_layout(config, group.size());
  config.validate(group.size());
  note_change(config, group);
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
