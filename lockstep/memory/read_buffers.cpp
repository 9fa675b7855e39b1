// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/read_buffers.h"

#include <algorithm>
#include <utility>

namespace lockstep::memory::detail {
namespace {

// One that is read into, one that waits, one in use.
constexpr size_t kKept = 3;

}  // namespace

std::shared_ptr<std::byte> ReadBuffers::take(size_t bytes) {
  const auto range = std::make_shared<AddressRange>(find(bytes));
  if (range->data() == nullptr) *range = AddressRange(bytes, AddressRange::Access::read_write);
  return {range->data(),
          [self = shared_from_this(), range](std::byte*) { self->give_back(std::move(*range)); }};
}

AddressRange ReadBuffers::find(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const AddressRange& range) {
    return range.size() >= bytes && range.size() <= 2 * bytes;
  });
  if (found == free_.end()) return {};
  AddressRange range = std::move(*found);
  free_.erase(found);
  return range;
}

void ReadBuffers::give_back(AddressRange range) {
  AddressRange oldest;  // goes when the lock is not held
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(range));
  if (free_.size() <= kKept) return;
  oldest = std::move(free_.front());
  free_.pop_front();
}

}  // namespace lockstep::memory::detail
