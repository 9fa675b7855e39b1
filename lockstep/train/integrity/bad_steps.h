// SPDX-License-Identifier: Apache-2.0
// Steps whose loss or gradients are not to be trusted, and what a run does about them. Private: not
// installed.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "lockstep/config/train_config.h"

namespace lockstep::train {

// Every rank has one and tells it the same, so all decide alike.
class BadSteps {
 public:
  // `speaks`: one rank's warnings are enough.
  BadSteps(const config::RunConfig& config, bool speaks) : config_(config), speaks_(speaks) {}

  // Whether a loss is far above those before. One that is not finite is, too.
  bool is_spike(double loss) const;

  struct Step {
    int64_t step = 0;
    double loss = 0;
    bool nonfinite = false;  // gradients; then `cause` names the ranks
    std::string cause = {};
  };
  bool is_bad(const Step& step) const { return step.nonfinite || is_spike(step.loss); }
  // After each step: warns, or throws Error where the run is to end. Returns whether the newest
  // checkpoint is to be loaded.
  bool must_roll_back(const Step& step);

  // What a copy of the run's state keeps of it, as text.
  std::string state() const;
  void restore(const std::string& state);

  // While the last step is a bad one, no checkpoint takes the place of a good one.
  bool last_is_bad() const { return in_a_row_ > 0; }

 private:
  double median() const;

  config::RunConfig config_;
  bool speaks_;
  std::deque<double> accepted_;  // losses, the newest last
  int64_t in_a_row_ = 0;         // bad steps
  int64_t rollbacks_ = 0;        // since the last good step after furthest_
  int64_t furthest_ = 0;         // bad step that led to a rollback
};

}  // namespace lockstep::train
