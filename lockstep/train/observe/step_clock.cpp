// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/observe/step_clock.h"

#include <algorithm>

namespace lockstep::train {
namespace {

double milliseconds_of(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

StepClock::StepClock(comm::Group world)
    : world_(std::move(world)),
      start_(Clock::now()),
      last_(start_),
      first_blocked_(world_.blocked_time()),
      blocked_(first_blocked_) {}

void StepClock::lap(double StepSplit::*kind, std::chrono::nanoseconds bubble) {
  const auto now = Clock::now();
  const auto blocked = world_.blocked_time();
  const double all = milliseconds_of(now - last_);
  // Threads may wait at the same time.
  const double waited = std::min(all, milliseconds_of(blocked - blocked_));
  const double in_bubble = std::min(waited, milliseconds_of(bubble));
  split_.*kind += all - waited;
  split_.communication_ms += waited - in_bubble;
  split_.bubble_ms += in_bubble;
  last_ = now;
  blocked_ = blocked;
}

void StepClock::find_update(double device_ms) {
  const double moved = std::min(device_ms, split_.compute_ms);
  split_.compute_ms -= moved;
  split_.optimizer_ms += moved;
}

void StepClock::find_stall(double longest_busy_ms) {
  split_.stall_ms = std::clamp(longest_busy_ms - split_.busy_ms(), 0.0, split_.communication_ms);
  split_.communication_ms -= split_.stall_ms;
}

double StepClock::step_ms() const { return milliseconds_of(last_ - start_); }

double StepClock::blocked_ms() const { return milliseconds_of(blocked_ - first_blocked_); }

}  // namespace lockstep::train
