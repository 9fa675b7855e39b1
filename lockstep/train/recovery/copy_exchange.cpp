// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/recovery/copy_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::train {
namespace {

constexpr uint64_t kExchanged = uint64_t{1} << 23;  // bytes of a message

// Of a stream of so many bytes.
uint64_t message_bytes(uint64_t bytes, uint64_t begin) {
  return begin < bytes ? std::min(kExchanged, bytes - begin) : 0;
}

at::Tensor room_for(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(std::min(bytes, kExchanged))}, at::kByte);
}

}  // namespace

CopyExchange::CopyExchange(comm::Group group, const CopyShare& share)
    : group_(std::move(group)), to_(share.to), bytes_(copy_bytes(share.sent)) {
  std::map<std::string, uint64_t> places;
  for (const CopiedSlice& slice : share.own) places[slice.key()] = slice.offset;
  for (const CopiedSlice& slice : share.sent)
    runs_.push_back({places.at(slice.key()), slice.offset, slice.bytes()});
  out_ = room_for(bytes_);
}

// Runs lie in order. What is between them only fills up to the alignment.
void CopyExchange::pack(std::span<const std::byte> data, uint64_t begin,
                        std::span<std::byte> message) const {
  const uint64_t end = begin + message.size();
  std::memset(message.data(), 0, message.size());
  auto run = std::upper_bound(runs_.begin(), runs_.end(), begin,
                              [](uint64_t at, const Run& each) { return at < each.to; });
  if (run != runs_.begin()) --run;
  for (; run != runs_.end() && run->to < end; ++run) {
    const uint64_t first = std::max(begin, run->to), last = std::min(end, run->to + run->bytes);
    if (first >= last) continue;
    std::memcpy(message.data() + (first - begin), data.data() + run->from + (first - run->to),
                last - first);
  }
}

void CopyExchange::run(std::span<const std::byte> data, std::span<const Incoming> incoming) {
  while (in_.size() < incoming.size()) in_.push_back(room_for(incoming[in_.size()].bytes));
  uint64_t longest = bytes_;
  for (const Incoming& each : incoming) longest = std::max(longest, each.bytes);
  const comm::CollectiveOptions options{.tag = "copies for another node"};
  const auto part = [](const at::Tensor& room, uint64_t bytes) {
    return room.narrow(0, 0, static_cast<int64_t>(bytes));
  };
  for (uint64_t begin = 0; begin < longest; begin += kExchanged) {
    std::vector<comm::Work> works;
    if (const uint64_t bytes = message_bytes(bytes_, begin); bytes > 0) {
      const at::Tensor message = part(out_, bytes);
      pack(data, begin, memory::bytes_of(message));
      works.push_back(comm::send(message, to_, group_, options));
    }
    for (size_t i = 0; i < incoming.size(); ++i) {
      if (const uint64_t bytes = message_bytes(incoming[i].bytes, begin); bytes > 0)
        works.push_back(comm::recv(part(in_[i], bytes), incoming[i].from, group_, options));
    }
    for (comm::Work& work : works) work.wait();
    for (size_t i = 0; i < incoming.size(); ++i) {
      if (const uint64_t bytes = message_bytes(incoming[i].bytes, begin); bytes > 0)
        incoming[i].region->append(memory::bytes_of(part(in_[i], bytes)));
    }
  }
}

}  // namespace lockstep::train
