// SPDX-License-Identifier: Apache-2.0
// The collectives as tasks over a board. See collectives.cpp for how each moves its data.
#pragma once

#include "lockstep/fabric/crew.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/fabric/seat.h"
#include "lockstep/fabric/task.h"

namespace lockstep::fabric {

// All three must outlive the task. The crew shares large reductions and copies.
Task run_collective(Seat& seat, const Operation& operation, Crew& crew);

}  // namespace lockstep::fabric
