// SPDX-License-Identifier: Apache-2.0
// What a training run shows on a terminal, or writes to a log where there is none.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/flight/slow_ranks.h"
#include "lockstep/train/observe/metrics.h"

namespace lockstep::train {

// On a terminal the last line is a bar that is drawn again and again; elsewhere only whole lines
// are written. Failures to write are ignored: training continues without a reader.
class Progress {
 public:
  // `speaks`: only one rank does. `first_step` is where a run that is resumed begins.
  Progress(bool speaks, int64_t first_step, int64_t total_steps, int64_t log_every);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // A line of its own.
  void line(const std::string& text);
  // A line every log_every steps, at the first and at the last; and the bar, with the loss, its
  // trend, speed, memory and slow ranks. Of a rank that has become slow there is a line too, unless
  // the launcher writes one.
  void step(const StepMetrics& metrics, const std::vector<flight::SlowRank>& slow = {});
  // Time that does not belong to steps (evaluation, checkpoints) is not counted as theirs.
  void pause();
  void resume();

 private:
  void draw_bar(const StepMetrics& metrics, const std::vector<flight::SlowRank>& slow);
  void say_slow(int64_t step, const std::vector<flight::SlowRank>& slow);
  void clear_bar();
  double seconds_left(int64_t step) const;

  bool speaks_, terminal_;
  int64_t first_step_, total_steps_, log_every_;
  Clock::time_point start_, paused_at_ = {};
  double paused_seconds_ = 0;
  bool bar_drawn_ = false;
  double recent_loss_ = 0, older_loss_ = 0;  // running means, over some 10 and 50 steps
  std::set<int> slow_;                       // that there was a line of
};

// "431", "12.3k", "4.56M": a number that is read, not calculated with.
std::string short_number(double value);
// "12 MB", "3.4 GB"
std::string short_bytes(int64_t bytes);
// "45s", "6m12s", "3h05m"
std::string short_time(double seconds);

}  // namespace lockstep::train
