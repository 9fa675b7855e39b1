// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "lockstep/comm/control/host_layout.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/rank_variables.h"

namespace lockstep::comm {
namespace {

// What a rank tells the others.
struct RankCores {
  int process = 0;
  std::vector<int> mask;
};

// Of the ranks of this rank's host. Masks say what launchers do not: whether they have bound the
// ranks, and to which cores.
std::vector<RankCores> cores_on_host(const Group& group) {
  const std::vector<int> mine = launch::affinity_mask();
  if (group.size() == 1) return {{getpid(), mine}};
  const auto texts =
      gather_texts(format("{} {}", getpid(), join(mine, " ")), group, {.tag = "cores"});
  const HostLayout layout = host_layout(group);
  const auto host = static_cast<size_t>(layout.host[static_cast<size_t>(group.rank())]);
  std::vector<RankCores> ranks;
  for (const int rank : layout.hosts[host]) {
    std::istringstream numbers(texts[static_cast<size_t>(rank)]);
    RankCores& of_rank = ranks.emplace_back();
    numbers >> of_rank.process;
    for (int core = 0; numbers >> core;) of_rank.mask.push_back(core);
  }
  return ranks;
}

// Empty unless all ranks of the host are processes with the same mask.
std::vector<int> own_cores(const std::vector<RankCores>& ranks, size_t index) {
  std::set<int> processes;
  for (const RankCores& rank : ranks) {
    if (rank.mask != ranks[index].mask || !processes.insert(rank.process).second) return {};
  }
  if (ranks.size() == 1) return {};
  return launch::core_share(launch::in_machine_order(ranks[index].mask), static_cast<int>(index),
                            static_cast<int>(ranks.size()));
}

}  // namespace

CoreShare share_of_cores(const Group& group) {
  const std::vector<RankCores> ranks = cores_on_host(group);
  const auto index = group.size() == 1 ? 0 : static_cast<size_t>(group.local_rank());
  std::vector<std::vector<int>> masks;
  for (const RankCores& rank : ranks) masks.push_back(rank.mask);
  const double cores = launch::cores_per_mask(masks, index);
  if (launch::user_set_threads()) return {.threads = at::get_num_threads(), .cores = cores};
  // Thirds of a core add up to a little less than one.
  return {.threads = std::max(1, static_cast<int>(cores + 1e-6)),
          .cores = cores,
          .own = own_cores(ranks, index)};
}

void bind_to_cores(const CoreShare& share) {
  if (!share.own.empty()) launch::set_affinity(share.own);
}

}  // namespace lockstep::comm
