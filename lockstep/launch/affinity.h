// Which cores each rank of this host runs on, and with how many threads.
#pragma once

#include <vector>

namespace lockstep::launch {

// The cores this process may use, in order.
std::vector<int> allowed_cores();

// Threads each of `ranks` ranks gets: cores / ranks, at least 1.
int threads_per_rank(int cores, int ranks);

// A contiguous share of the cores for one rank; all shares together are all cores. Empty, which
// means "do not pin", when there are more ranks than cores: then the kernel balances better than
// any fixed choice.
std::vector<int> core_share(const std::vector<int>& cores, int rank, int ranks);

}  // namespace lockstep::launch
