#include "lockstep/comm/nccl/devices.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/comm/nccl/runtime.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::nccl {

std::string problem_of(std::span<const int> hosts,
                       const std::vector<std::vector<std::string>>& devices) {
  std::map<std::pair<int, std::string>, size_t> taken;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto& visible = devices[rank];
    if (visible.empty()) return format("rank {} cannot use NCCL or has no CUDA device", rank);
    const auto local = static_cast<size_t>(
        std::count(hosts.begin(), hosts.begin() + static_cast<int64_t>(rank), hosts[rank]));
    const std::string& device = visible[local % visible.size()];
    const auto [other, is_new] = taken.try_emplace({hosts[rank], device}, rank);
    if (!is_new) {
      return format("ranks {} and {} share CUDA device {} of their host, each must have its own",
                    other->second, rank, local % visible.size());
    }
  }
  return {};
}

void publish_devices(launch::Store& store, int rank) {
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
  std::string problem = problem_of(hosts, devices);
  store.set("devices", problem);
  return problem;
}

}  // namespace lockstep::comm::nccl
