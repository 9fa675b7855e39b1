// SPDX-License-Identifier: Apache-2.0
// Which checkpoint has the lowest validation loss (checkpoint.best). Private: not installed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

// Rank 0 decides for all ranks, because only it hears in time which saves have failed; the others
// follow, so that any copy of a run's state has the best one.
class BestCheckpoint {
 public:
  // `measure` says what losses are measured on: those of another measure are not compared.
  BestCheckpoint(const config::CheckpointConfig& config, std::string measure, comm::Group world);

  // Collective. Takes over what a checkpoint's state says. The best one so far must be in
  // checkpoint.dir, and measured alike; else the one before it is taken, or the search starts
  // again, with a warning. That of step `unsaved` need not be there: the weights are, and are to be
  // saved.
  void restore(const std::map<std::string, std::string>& state,
               std::optional<int64_t> unsaved = std::nullopt);
  // Collective: whether this loss is lower than those before, so that the step is to be saved. The
  // same on all ranks. Always false without checkpoint.best.
  bool offer(int64_t step, double loss);
  // The save of this step failed: the one before is the best.
  void not_saved(int64_t step);

  // The step of the best one.
  std::optional<int64_t> step() const;
  std::string describe() const;  // a line for people; empty where there is none
  void add_to(std::map<std::string, std::string>& state) const;

 private:
  struct Best {
    int64_t step = 0;
    double loss = 0;
  };
  struct Known {
    Best best;
    std::optional<Best> before;
    std::string measure;
  };
  static Known parse(const std::string& text);
  enum class Verdict { start_again, best, before };
  Verdict judge(const Known& known, std::optional<int64_t> unsaved) const;

  bool enabled_;
  std::string dir_, measure_;
  comm::Group world_;
  std::optional<Best> best_, before_;
};

}  // namespace lockstep::train
