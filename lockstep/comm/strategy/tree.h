// SPDX-License-Identifier: Apache-2.0
// Ranks in a binary tree: partial sums go up to rank 0, results come down.
#pragma once

#include "lockstep/comm/strategy/algorithm.h"

namespace lockstep::comm::strategy {

// `messages` has the ranks of the group, in its order.
std::unique_ptr<Algorithm> make_tree(AlgorithmGroup messages);

}  // namespace lockstep::comm::strategy
