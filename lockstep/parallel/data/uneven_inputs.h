// SPDX-License-Identifier: Apache-2.0
// Who still trains, when ranks may run out of data at different times.
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::parallel::detail {

// What a rank is about to do; ranks that have left follow the others.
enum class Activity { none, buffers, gradients, layout };

struct Attendance {
  Activity activity = Activity::none;
  int active = 1;  // ranks that take part
  int leader = 0;  // the lowest of them: its buffers and weights count
};

// Says what this rank is about to do, and returns what the active ones do. Collective.
Attendance announce(Activity activity, const comm::Group& group);

}  // namespace lockstep::parallel::detail
