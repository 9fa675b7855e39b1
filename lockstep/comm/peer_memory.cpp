#include "lockstep/comm/peer_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {

std::optional<PeerMemory> PeerMemory::open(const at::Tensor& mine, const Group& group) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(fabric::Location));
  const auto bytes = detail::bytes_of(mine);
  const fabric::Location location = group.impl().locate(bytes.data(), bytes.size());
  const at::Tensor sent = at::empty({kBytes}, at::kByte);
  std::memcpy(sent.data_ptr(), &location, sizeof location);
  const at::Tensor all = at::empty({group.size() * kBytes}, at::kByte);
  all_gather(all, sent, group, {.tag = "peer memory"}).wait();
  std::vector<fabric::Location> locations(static_cast<size_t>(group.size()));
  std::memcpy(locations.data(), all.data_ptr(), all.nbytes());
  const auto unreachable = [](const fabric::Location& each) {
    return each.kind == fabric::Location::unreachable;
  };
  if (std::any_of(locations.begin(), locations.end(), unreachable)) return std::nullopt;
  return PeerMemory(group, std::move(locations));
}

const std::byte* PeerMemory::of(int rank) const {
  try {
    return group_.impl().reach(rank, locations_[static_cast<size_t>(rank)]);
  } catch (const std::logic_error&) {
    throw PeerLost(rank, format("[peer memory] rank {}: rank {} has freed the memory that is to be "
                                "read",
                                group_.rank(), rank));
  }
}

}  // namespace lockstep::comm
