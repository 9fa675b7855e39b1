// Whether every rank has a GPU of its own, which NCCL demands: all ranks must come to one answer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/launch/store.h"

namespace lockstep::comm::nccl {

// Why these ranks cannot use NCCL; empty if they can. For every rank: its host, and the devices it
// sees, of which it takes the one with the number of its local rank.
std::string problem_of(std::span<const int> hosts,
                       const std::vector<std::vector<std::string>>& devices);

// Says what this rank sees. Before its host is known to the others.
void publish_devices(launch::Store& store, int rank);
// The answer of rank 0. Collective, when all ranks have published.
std::string agree_on_devices(launch::Store& store, int rank, std::span<const int> hosts,
                             const Deadline& deadline);

}  // namespace lockstep::comm::nccl
