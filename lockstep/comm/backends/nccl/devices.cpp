// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/nccl/devices.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::nccl {

bool may_share_devices() {
  const char* const word = std::getenv("LOCKSTEP_SHARE_GPU");
  return word != nullptr && std::string_view(word) == "1";
}

std::string problem_of(std::span<const int> hosts,
                       const std::vector<std::vector<std::string>>& devices, bool may_share) {
  std::map<std::pair<int, std::string>, size_t> taken;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto& visible = devices[rank];
    if (visible.empty()) return format("rank {} cannot use NCCL or has no CUDA device", rank);
    const auto local = static_cast<size_t>(
        std::count(hosts.begin(), hosts.begin() + static_cast<int64_t>(rank), hosts[rank]));
    const std::string& device = visible[local % visible.size()];
    const auto [other, is_new] = taken.try_emplace({hosts[rank], device}, rank);
    if (!is_new && !may_share) {
      return format("ranks {} and {} share CUDA device {} of their host, each must have its own",
                    other->second, rank, local % visible.size());
    }
  }
  return {};
}

void publish_devices(launch::Store& store, int rank) {
  if (may_share_devices()) {
    setenv("NCCL_HOSTID", format("lockstep-rank-{}", rank).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
  }
  store.set(format("device/{}", rank),
            problem().empty() ? join(cuda_runtime()->devices(), " ") : "");
}

std::string agree_on_devices(launch::Store& store, int rank, std::span<const int> hosts,
                             const Deadline& deadline) {
  if (rank != 0) return store.get("devices", deadline);
  std::vector<std::vector<std::string>> devices(hosts.size());
  for (size_t each = 0; each < hosts.size(); ++each) {
    std::istringstream words(store.get(format("device/{}", each), deadline));
    for (std::string device; words >> device;) devices[each].push_back(device);
  }
  std::string problem = problem_of(hosts, devices, may_share_devices());
  store.set("devices", problem);
  return problem;
}

}  // namespace lockstep::comm::nccl
