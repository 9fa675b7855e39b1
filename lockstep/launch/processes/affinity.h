// SPDX-License-Identifier: Apache-2.0
// Which cores each rank of this host runs on, and with how many threads.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::launch {

// The cores this process may use, by the kernel's numbers.
std::vector<int> affinity_mask();

// Binds the calling thread, and those that it starts later.
void set_affinity(const std::vector<int>& cores);

// The cores of affinity_mask(), in the order of in_machine_order().
std::vector<int> allowed_cores();

// Neighbours in the machine next to each other: by NUMA node, then cache, then core, as hwloc finds
// them. The kernel's numbers may alternate between sockets, and two of one core may be far apart.
std::vector<int> in_machine_order(const std::vector<int>& cores);

// Threads each of `ranks` ranks gets: cores / ranks, at least 1.
int threads_per_rank(int cores, int ranks);

// The cores that the rank with masks[index] can count on, where masks are those of all ranks of a
// host: a core that n of them may use counts 1 / n.
double cores_per_mask(const std::vector<std::vector<int>>& masks, size_t index);

// A contiguous share of the cores for one rank; all shares together are all cores. Of cores in
// machine order no share reaches over two NUMA nodes where the ranks can be dealt out evenly to
// them. Empty, which means "do not pin", when there are more ranks than cores: then the kernel
// balances better than any fixed choice.
std::vector<int> core_share(const std::vector<int>& cores, int rank, int ranks);

}  // namespace lockstep::launch
