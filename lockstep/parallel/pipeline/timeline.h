// SPDX-License-Identifier: Apache-2.0
// What Pipeline::timeline() is made of. Private: not installed.
#pragma once

#include "lockstep/core/clock.h"
#include "lockstep/schedule/lower.h"

namespace lockstep::parallel {

struct TimedAction {
  schedule::Action action;
  // Of the computation: waiting for its input is not in it. On CUDA that of queueing it, unless
  // there is a trace, for which every action is waited for.
  Clock::time_point start, end;
};

}  // namespace lockstep::parallel
