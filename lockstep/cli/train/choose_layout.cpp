// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/choose_layout.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <sstream>

#include "lockstep/cli/common/torch_program.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/model_source.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/config/plan/run_metrics.h"
#include "lockstep/config/plan/search.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"

namespace lockstep::cli {
namespace {

using config::Prediction;
using Words = std::vector<std::string>;
namespace fs = std::filesystem;

constexpr int kTrialSteps = 8;

Words words_of(const std::string& flags) {
  std::istringstream stream(flags);
  Words words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

struct TemporaryFolder {
  fs::path path;
  explicit TemporaryFolder(fs::path folder) : path(std::move(folder)) {}
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

// Seconds of a step, from a run of a few. Weights begin as those of the run do, because initial
// values depend on the seed alone, and are thrown away.
std::optional<double> tried(const config::TrainConfig& config, const Words& arguments,
                            const Words& layout, const std::string& folder) {
  Words command{own_path(), "train"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  command.insert(command.end(), layout.begin(), layout.end());
  // Nothing is continued, saved, evaluated or observed.
  const Words trial{"--run.dir",
                    folder,
                    "--train.steps",
                    std::to_string(kTrialSteps),
                    "--optim.schedule",
                    "constant",
                    "--optim.warmup",
                    "0",
                    "--optim.decay_steps",
                    "0",
                    "--train.log_every",
                    "1000",
                    "--train.eval_every",
                    "0",
                    "--train.eval_first",
                    "false",
                    "--train.on_spike",
                    "warn",
                    "--train.on_nonfinite",
                    "skip",
                    "--checkpoint.dir",
                    "",
                    "--checkpoint.every",
                    "0",
                    "--checkpoint.async",
                    "false",
                    "--checkpoint.when_busy",
                    "wait",
                    "--checkpoint.best",
                    "false",
                    "--metrics.file",
                    "auto",
                    "--metrics.tensorboard",
                    "",
                    "--metrics.trace",
                    "",
                    "--metrics.sample_tokens",
                    "0",
                    "--metrics.health_every",
                    "0"};
  command.insert(command.end(), trial.begin(), trial.end());
  // What is fine-tuned has the sizes of the checkpoint, and begins at step 0.
  if (config.checkpoint.load == config::LoadWhat::all)
    command.insert(command.end(), {"--checkpoint.resume", "none"});
  const int status = run_program(command, StandardOutput::discarded);
  if (status != 0) return std::nullopt;
  return config::measured_step(folder).seconds;
}

}  // namespace

Words choose_layout(const config::TrainArguments& parsed, const Words& arguments, int world) {
  config::TrainConfig config = parsed.config;
  config::complete_model(config, parsed.origins);
  const bool open = config.model.vocab == 0 && config.model_path.empty();
  const config::ModelSpec model =
      config::resolve_model(config, open ? config::open_tokenizer(config).vocab_size() : 0);
  const plan::Cluster cluster = config::cluster_for("").cluster;
  const config::SearchResult result =
      config::search_layouts(config, model, parsed.origins, {world}, cluster);
  const int64_t limit = config::memory_limit(config, cluster);
  if (result.candidates == 0)
    throw ConfigError(format(
        "parallel.auto: no layout of {} is allowed with the options that are given, by flags "
        "or in a file, for this model; leave out options of parallel, or use another -n",
        counted(world, "rank")));
  if (result.best.empty())
    throw ConfigError(
        format("parallel.auto: of {} layouts of {} none fits in {}; the smallest takes about {} "
               "({}): use more ranks or a smaller model",
               result.candidates, counted(world, "rank"), size_text(limit),
               size_text(result.least_memory), result.smallest));
  const size_t count =
      std::min(result.best.size(), static_cast<size_t>(std::max(1, config.parallel.attempts)));
  size_t chosen = 0;
  std::optional<double> least;
  for (size_t i = 0; i < count && config.parallel.attempts > 0; ++i) {
    const std::string flags = config::layout_flags(result.best[i].config);
    const TemporaryFolder folder(fs::temp_directory_path() /
                                 format("lockstep-try-{}-{}", getpid(), i));
    Words layout = words_of(flags);
    layout.insert(layout.end(), {"--parallel.auto", "false", "--parallel.try", "0"});
    const auto seconds = tried(config, arguments, layout, folder.path.string());
    if (!seconds) {
      std::cerr << format("parallel.auto: tried {}: the trial failed\n", flags);
      continue;
    }
    std::cerr << format("parallel.auto: tried {}: {:.1f} ms a step, predicted {:.1f} ms\n", flags,
                        1e3 * *seconds, 1e3 * result.best[i].time.total());
    if (!least || *seconds < *least) {
      chosen = i;
      least = seconds;
    }
  }
  if (config.parallel.attempts > 0 && !least)
    throw ConfigError(
        format("parallel.auto: {} of {} steps failed; --parallel.try 0 trains in the "
               "first layout without a trial, and shows why",
               counted(static_cast<int64_t>(count), "trial"), kTrialSteps));
  const Prediction& best = result.best[chosen];
  const std::string flags = config::layout_flags(best.config);
  std::cerr << format(
      "parallel.auto: {}: number {} of {} layouts on {} ({}), predicted {:.1f} ms a step and {} a "
      "rank{}\n",
      flags, chosen + 1, result.candidates, cluster.name, cluster.note, 1e3 * best.time.total(),
      size_text(best.memory),
      config.parallel.attempts > 0 ? format(", the fastest of {} that were tried", count) : "");
  Words layout = words_of(flags);
  layout.insert(layout.end(), {"--parallel.auto", "false", "--parallel.try", "0"});
  return layout;
}

}  // namespace lockstep::cli
