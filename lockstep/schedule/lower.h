// SPDX-License-Identifier: Apache-2.0
// From a schedule to a rank's whole program: what it computes, sends and receives, and when the
// parameters of its chunks are gathered and its gradients reduced.
//
// Sends and receives are asynchronous: a send hands a value over, a receive asks for one, and the
// computation that uses it waits. Between two ranks values arrive in the order in which they are
// sent, activations and gradients alike. Stages on the same rank pass values without either.
#pragma once

#include <vector>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule {

struct LowerOptions {
  bool unshard = false;   // add unshard before a chunk is used and reshard when it is done with
  int max_unsharded = 3;  // chunks of a rank that may be gathered at the same time
  bool reduce = false;    // add reduce behind a chunk's last gradient
};

struct Program : Pipeline {
  std::vector<std::vector<Action>> actions = {};  // of each rank, all ops

  bool operator==(const Program&) const = default;
};

// The schedule must be valid. Sends stand right behind the computation that makes the value;
// receives and unshards one computation ahead of their use, so that they run under that.
Program lower(const Schedule& schedule, const LowerOptions& options = {});

// Runs the program without values. Throws ConfigError that says what each rank waits for if they
// stand still, and if a receive meets another value than it names, or a value meets no receive.
void check_deadlock(const Program& program);

}  // namespace lockstep::schedule
