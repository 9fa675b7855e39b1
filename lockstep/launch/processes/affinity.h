// SPDX-License-Identifier: Apache-2.0
// Which cores each rank of this host runs on, and with how many threads.
#pragma once

#include <vector>

namespace lockstep::launch {

// The cores this process may use, in the order of in_machine_order().
std::vector<int> allowed_cores();

// Neighbours in the machine next to each other: by NUMA node, then cache, then core, as hwloc finds
// them. The kernel's numbers may alternate between sockets, and two of one core may be far apart.
std::vector<int> in_machine_order(const std::vector<int>& cores);

// Threads each of `ranks` ranks gets: cores / ranks, at least 1.
int threads_per_rank(int cores, int ranks);

// A contiguous share of the cores for one rank; all shares together are all cores. Of cores in
// machine order no share reaches over two NUMA nodes where the ranks can be dealt out evenly to
// them. Empty, which means "do not pin", when there are more ranks than cores: then the kernel
// balances better than any fixed choice.
std::vector<int> core_share(const std::vector<int>& cores, int rank, int ranks);

}  // namespace lockstep::launch
