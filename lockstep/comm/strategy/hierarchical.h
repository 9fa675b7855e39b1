// SPDX-License-Identifier: Apache-2.0
// Shared memory inside each host, the network between them.
#pragma once

#include "lockstep/comm/control/host_layout.h"
#include "lockstep/comm/strategy/algorithm.h"

namespace lockstep::comm::strategy {

// `inside` has the ranks of this host, `across` those with this rank's place on every host (this
// rank alone, where not all hosts have its place).
std::unique_ptr<Algorithm> make_hierarchical(HostLayout layout, int rank, AlgorithmGroup inside,
                                             AlgorithmGroup across);

}  // namespace lockstep::comm::strategy
