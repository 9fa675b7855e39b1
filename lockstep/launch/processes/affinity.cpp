// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/affinity.h"

#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>

#include "lockstep/core/error.h"

namespace lockstep::launch {

std::vector<int> affinity_mask() {
  // The kernel's mask may be longer than a cpu_set_t on very large machines; ask for more until it
  // fits.
  for (int count = CPU_SETSIZE; count <= (1 << 20); count *= 2) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<size_t>(count));
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(count));
    const int failure = sched_getaffinity(0, size, set) == 0 ? 0 : errno;
    std::vector<int> cores;
    for (int core = 0; failure == 0 && core < count; ++core) {
      if (CPU_ISSET_S(static_cast<size_t>(core), size, set)) cores.push_back(core);
    }
    CPU_FREE(set);
    if (failure == 0) return cores;
    if (failure != EINVAL) throw SystemError("sched_getaffinity", failure);
  }
  throw SystemError("sched_getaffinity", EINVAL);
}

void set_affinity(const std::vector<int>& cores) {
  if (cores.empty()) throw ConfigError("a thread needs at least one core to run on");
  const auto count = static_cast<size_t>(*std::max_element(cores.begin(), cores.end())) + 1;
  cpu_set_t* const set = CPU_ALLOC(count);
  const size_t size = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(size, set);
  for (const int core : cores) CPU_SET_S(static_cast<size_t>(core), size, set);
  const int failure = sched_setaffinity(0, size, set) == 0 ? 0 : errno;
  CPU_FREE(set);
  if (failure != 0) throw SystemError("sched_setaffinity", failure);
}

std::vector<int> allowed_cores() { return in_machine_order(affinity_mask()); }

std::vector<int> in_machine_order(const std::vector<int>& cores) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) return cores;
  const std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> topology(
      made, &hwloc_topology_destroy);
  if (hwloc_topology_load(made) != 0) return cores;
  std::vector<int> ordered;
  const auto add = [&](int core) {
    const bool ours = std::find(cores.begin(), cores.end(), core) != cores.end();
    if (ours && std::find(ordered.begin(), ordered.end(), core) == ordered.end()) {
      ordered.push_back(core);
    }
  };
  for (hwloc_obj_t unit = nullptr;
       (unit = hwloc_get_next_obj_by_type(made, HWLOC_OBJ_PU, unit)) != nullptr;) {
    add(static_cast<int>(unit->os_index));
  }
  for (const int core : cores) add(core);  // what hwloc does not know keeps its place at the end
  return ordered;
}

int threads_per_rank(int cores, int ranks) { return std::max(1, cores / std::max(1, ranks)); }

double cores_per_mask(const std::vector<std::vector<int>>& masks, size_t index) {
  std::map<int, int> users;  // of each core
  for (const auto& mask : masks) {
    for (const int core : mask) ++users[core];
  }
  double cores = 0;
  for (const int core : masks[index]) cores += 1.0 / users[core];
  return cores;
}

std::vector<int> core_share(const std::vector<int>& cores, int rank, int ranks) {
  const auto count = static_cast<long>(cores.size());
  if (ranks > count) return {};
  return {cores.begin() + count * rank / ranks, cores.begin() + count * (rank + 1) / ranks};
}

}  // namespace lockstep::launch
