// `lockstep bench collectives`: how long the operations take on this machine.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// What one rank does, in lockstep-torch.
int bench_collectives_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
