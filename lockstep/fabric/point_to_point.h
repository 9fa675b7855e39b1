// SPDX-License-Identifier: Apache-2.0
// Messages from one rank to another, as tasks over a channel of the board.
#pragma once

#include "lockstep/fabric/operation.h"
#include "lockstep/fabric/seat.h"
#include "lockstep/fabric/task.h"

namespace lockstep::fabric {

// `pieces` is how many have passed through the channel, counted alike at both ends. All arguments
// must outlive the task. A send is complete when its data can be overwritten, which may be before
// the receiver has asked for it.
Task run_send(Seat& seat, const Operation& operation, uint64_t& pieces);
Task run_recv(Seat& seat, const Operation& operation, uint64_t& pieces);
// Only the headers, on a bare board; the data goes another way. A sender waits for its receiver
// only when it is Board::num_headers() messages ahead.
Task announce_send(Seat& seat, const Operation& operation, uint64_t& pieces);
Task announce_recv(Seat& seat, const Operation& operation, uint64_t& pieces);

}  // namespace lockstep::fabric
