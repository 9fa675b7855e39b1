// SPDX-License-Identifier: Apache-2.0
// Whether every rank has a GPU of its own, which NCCL demands: all ranks must come to one answer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/launch/rendezvous/store.h"

namespace lockstep::comm::nccl {

// Whether LOCKSTEP_SHARE_GPU=1 allows several ranks on one device. It is for tests on a machine
// with too few GPUs: each rank then looks to NCCL like a host of its own, and data moves over
// loopback.
bool may_share_devices();

// Why these ranks cannot use NCCL; empty if they can. For every rank: its host, and the devices it
// sees, of which it takes the one with the number of its local rank.
std::string problem_of(std::span<const int> hosts,
                       const std::vector<std::vector<std::string>>& devices,
                       bool may_share = false);

// Says what this rank sees. Before its host is known to the others, and before NCCL is used: where
// devices may be shared it sets the variables that NCCL reads when it starts.
void publish_devices(launch::Store& store, int rank);
// The answer of rank 0. Collective, when all ranks have published.
std::string agree_on_devices(launch::Store& store, int rank, std::span<const int> hosts,
                             const Deadline& deadline);

}  // namespace lockstep::comm::nccl
