#include "lockstep/comm/peer_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/shared_objects.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {

namespace {

// Every rank's value, in rank order. Collective.
template <class Value>
std::vector<Value> gather(const Value& mine, const Group& group) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Value));
  const at::Tensor sent = at::empty({kBytes}, at::kByte);
  std::memcpy(sent.data_ptr(), &mine, sizeof mine);
  const at::Tensor all = at::empty({group.size() * kBytes}, at::kByte);
  all_gather(all, sent, group, {.tag = "peer memory"}).wait();
  std::vector<Value> values(static_cast<size_t>(group.size()));
  std::memcpy(values.data(), all.data_ptr(), all.nbytes());
  return values;
}

// A rank that is a thread may end, and free its memory, while others read.
std::shared_ptr<void> hold_all(const at::Tensor& mine, const Group& group) {
  if (group.backend() != "thread") return nullptr;
  detail::SharedObjects& objects = *group.impl().membership().world->objects;
  const uint64_t number = objects.put(std::make_shared<at::Tensor>(mine));
  auto held = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (const uint64_t each : gather(number, group)) held->push_back(objects.get(each));
  barrier(group, {.tag = "peer memory"}).wait();
  objects.remove(number);
  return held;
}

}  // namespace

std::optional<PeerMemory> PeerMemory::open(const at::Tensor& mine, const Group& group) {
  const auto bytes = detail::bytes_of(mine);
  const auto locations = gather(group.impl().locate(bytes.data(), bytes.size()), group);
  const auto unreachable = [](const fabric::Location& each) {
    return each.kind == fabric::Location::unreachable;
  };
  if (std::any_of(locations.begin(), locations.end(), unreachable)) return std::nullopt;
  return PeerMemory(group, locations, hold_all(mine, group));
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
