// SPDX-License-Identifier: Apache-2.0
// The folder of a training run. Nothing in it names its own path, so it can be moved:
//
//   config.toml         every key, with the sizes of the model and absolute paths
//   environment.jsonl   one line for each start: versions, hosts, devices, commit
//   events.jsonl        starts, saves, skipped steps, warnings, memory of each rank
//   (run_observer.h) metrics.jsonl, log.txt, traces/, checkpoints/ tokenizer.json      a copy of
//   the file that the run uses, with others of its model
//                       (run_tokenizer.h)
//
// Private: not installed.
#pragma once

#include <string>

#include "lockstep/config/train_arguments.h"
#include "lockstep/core/rank_env.h"

namespace lockstep::config {

// Whether a run was started in this folder.
bool is_run_folder(const std::string& path);
std::string run_config_file(const std::string& folder);
// The configuration in a run folder. ConfigError where it cannot be read.
TrainConfig read_run_config(const std::string& folder);
// The same of a start that is in progress. A resumed run keeps its config.toml until
// commit_run_config(), once nothing can be refused any more.
TrainConfig read_next_run_config(const std::string& folder);
void commit_run_config(const std::string& folder);

// A run folder, or what it holds.
struct PlaceInRun {
  std::string run = {};         // empty: the path is of no run folder
  std::string checkpoint = {};  // empty: the run itself, or its folder of checkpoints
};
// RUN, RUN/checkpoints, RUN/checkpoints/NAME, and RUN/best for RUN/checkpoints/best.
PlaceInRun place_in_run(const std::string& path);
// The path, or what RUN/best stands for. ConfigError where there is no such folder.
std::string checkpoint_path(const std::string& path);
bool same_folder(const std::string& a, const std::string& b);
// The folder that has the checkpoints of a run folder; `path` itself where it is none.
std::string checkpoint_folder(const std::string& path);
// Relative to the working directory where it lies inside, for lines that people read.
std::string shown_path(const std::string& path);

// Decides where the files of a run belong and what it resumes from, then makes the folder. Only
// rank 0, or the process that starts the ranks, does this.
class RunFolder {
 public:
  // Writes nothing. ConfigError where run.dir holds another run that has made a step, where
  // checkpoint.resume is auto without a folder to look in, and as complete_model() throws.
  RunFolder(const TrainArguments& arguments, const RankEnv& env);

  // What to train with. Paths in a folder that open() has yet to make are still "auto".
  const TrainConfig& config() const { return config_; }

  // Makes or reuses the folder, and writes the configuration and the tokenizer. From here on
  // log.txt gets all lines of the log. Returns what differs from the arguments, for adopt().
  // ConfigError where the folder cannot be written.
  std::string open(const ModelSpec& model);

 private:
  void begin(const std::string& own);
  void begin_from(const std::string& folder);
  void write(const ModelSpec& model);
  void make();
  void place();
  TrainConfig stored(const ModelSpec& model) const;

  const TrainArguments arguments_;
  TrainConfig asked_;  // by the arguments, completed, for config.toml
  TrainConfig config_;
  CheckpointConfig start_;  // how the run began, for config.toml
  std::string job_;         // that a restart knows its folder by; empty: there are no restarts
  bool launched_;           // by another launcher
  bool is_new_ = true;
};

// For a start after the first of a job: where it has saved a checkpoint, it continues from the
// newest one that is sound, whatever it began with. Returns whether there is one.
bool resume_own_checkpoints(TrainConfig& config);

// Applies what open() has returned on rank 0.
void adopt(TrainConfig& config, const std::string& settings);

}  // namespace lockstep::config
