// SPDX-License-Identifier: Apache-2.0
// `lockstep bench collectives`: how long the operations take on this machine.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

inline constexpr const char* kBenchOperations[] = {
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
    "all_to_all", "gather", "scatter",   "send_recv",  "barrier"};

// What one rank does, in lockstep-torch.
int bench_collectives_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
