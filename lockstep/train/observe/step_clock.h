// SPDX-License-Identifier: Apache-2.0
// Where the time of a step goes, on this rank. Private: not installed.
#pragma once

#include <chrono>

#include "lockstep/comm/group.h"
#include "lockstep/core/clock.h"

namespace lockstep::train {

// Milliseconds. All but checkpoint_ms add up to the step.
struct StepSplit {
  double compute_ms = 0;        // forward, backward and the norm of the gradients
  double communication_ms = 0;  // that the rank waited for, without the next two
  double bubble_ms = 0;         // waiting for tensors of other pipeline stages
  double stall_ms = 0;          // waiting for the rank that computed longest
  double optimizer_ms = 0;
  double data_ms = 0;
  double checkpoint_ms = 0;  // that training waited for saving, before this step

  double busy_ms() const { return compute_ms + optimizer_ms + data_ms; }
};

// Time is read between the parts of a step. What the rank was blocked in communication goes to
// communication or to the bubble, the rest to the part's own kind.
class StepClock {
 public:
  explicit StepClock(comm::Group world);

  // The time since the last call belongs to `kind`; `bubble` is the part of it in which the rank
  // waited for other stages.
  void lap(double StepSplit::*kind, std::chrono::nanoseconds bubble = {});
  // The device computed the last update while this step began: its time goes from computation to
  // the optimizer.
  void find_update(double device_ms);
  // Moves the time that this rank waited for the slowest from communication to stall.
  void find_stall(double longest_busy_ms);

  const StepSplit& split() const { return split_; }
  double step_ms() const;     // to the last lap
  double blocked_ms() const;  // of all threads of the rank, which may be more than the split has

 private:
  comm::Group world_;
  Clock::time_point start_, last_;
  std::chrono::nanoseconds first_blocked_, blocked_;
  StepSplit split_;
};

}  // namespace lockstep::train
