// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>

#include <algorithm>
#include <sstream>

#include "lockstep/comm/control/host_layout.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/rank_variables.h"

namespace lockstep::comm {
namespace {

// Masks say what launchers do not: whether they have bound the ranks, and to which cores.
double cores_of(const Group& group) {
  const std::vector<int> mine = launch::affinity_mask();
  if (group.size() == 1) return static_cast<double>(mine.size());
  const auto texts = gather_texts(join(mine, " "), group, {.tag = "cores"});
  const HostLayout layout = host_layout(group);
  const auto host = static_cast<size_t>(layout.host[static_cast<size_t>(group.rank())]);
  std::vector<std::vector<int>> masks;
  for (const int rank : layout.hosts[host]) {
    std::istringstream cores(texts[static_cast<size_t>(rank)]);
    masks.emplace_back();
    for (int core = 0; cores >> core;) masks.back().push_back(core);
  }
  return launch::cores_per_mask(masks, static_cast<size_t>(group.local_rank()));
}

}  // namespace

CoreShare share_of_cores(const Group& group) {
  const double cores = cores_of(group);
  if (launch::user_set_threads()) return {.threads = at::get_num_threads(), .cores = cores};
  // Thirds of a core add up to a little less than one.
  return {.threads = std::max(1, static_cast<int>(cores + 1e-6)), .cores = cores};
}

}  // namespace lockstep::comm
