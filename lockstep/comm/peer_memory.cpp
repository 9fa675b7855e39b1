// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/peer_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/shared_objects.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/tensor_bytes.h"

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
  detail::SharedObjects& objects = *detail::impl_of(group).membership().world->objects;
  const uint64_t number = objects.put(std::make_shared<at::Tensor>(mine));
  auto held = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (const uint64_t each : gather(number, group)) held->push_back(objects.get(each));
  barrier(group, {.tag = "peer memory"}).wait();
  objects.remove(number);
  return held;
}

}  // namespace

std::optional<PeerMemory> PeerMemory::open(const at::Tensor& mine, const Group& group) {
  if (!mine.defined() || !mine.is_contiguous() || mine.is_neg()) {
    throw ConfigError(format("[peer memory] rank {}: the tensor must be contiguous", group.rank()));
  }
  const auto bytes = memory::bytes_of(mine);
  const auto locations = gather(detail::impl_of(group).locate(bytes.data(), bytes.size()), group);
  std::vector<std::shared_ptr<const std::byte>> memory;
  bool complete = true, any = false;
  for (int rank = 0; rank < group.size(); ++rank) {
    const fabric::Location& location = locations[static_cast<size_t>(rank)];
    const bool reachable = location.kind != fabric::Location::unreachable;
    complete &= reachable;
    any |= reachable;
    memory.push_back(reachable ? detail::impl_of(group).reach(rank, location) : nullptr);
  }
  std::shared_ptr<void> held = hold_all(mine, group);
  // A rank may end, and its memory with it, when all have opened that.
  if (any) barrier(group, {.tag = "peer memory"}).wait();
  if (!complete) return std::nullopt;
  return PeerMemory(std::move(memory), std::move(held));
}

}  // namespace lockstep::comm
