// SPDX-License-Identifier: Apache-2.0
// Ranks in a circle: each sends to the next and receives from the one before.
#pragma once

#include "lockstep/comm/strategy/algorithm.h"

namespace lockstep::comm::strategy {

// `messages` has the ranks of the group, in its order.
std::unique_ptr<Algorithm> make_ring(AlgorithmGroup messages);

}  // namespace lockstep::comm::strategy
