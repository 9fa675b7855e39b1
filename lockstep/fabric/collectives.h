// SPDX-License-Identifier: Apache-2.0
// The collectives as tasks over a board. See collectives.cpp for how each moves its data.
#pragma once

#include "lockstep/fabric/operation.h"
#include "lockstep/fabric/seat.h"
#include "lockstep/fabric/task.h"

namespace lockstep::fabric {

// `seat` and `operation` must outlive the task.
Task run_collective(Seat& seat, const Operation& operation);

}  // namespace lockstep::fabric
