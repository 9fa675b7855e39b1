// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/recompute/recompute.h"

#include <iterator>
#include <utility>

#include "lockstep/parallel/recompute/stored_inputs.h"

namespace lockstep::parallel {
namespace {

// Inputs that are read ahead: one while the one before it is used, and one more for the time that
// the disk takes.
constexpr int kAhead = 2;
// Enough for any step; a graph that is kept for ever must not make the order grow for ever.
constexpr int64_t kMaxLearned = 1 << 20;

}  // namespace

ActivationStore::ActivationStore(const std::string& folder, memory::DiskStoreOptions options)
    : disk_(std::in_place, folder, options) {}

int64_t ActivationStore::add(detail::StoredInputs* inputs) {
  const std::lock_guard lock(mutex_);
  kept_.emplace(next_, inputs);
  return next_++;
}

void ActivationStore::remove(int64_t number) {
  const std::lock_guard lock(mutex_);
  kept_.erase(number);
  if (!kept_.empty()) return;
  next_ = 0;
  last_wanted_.reset();
}

std::optional<int64_t> ActivationStore::guess(int64_t number) const {
  // One that is not there yet is not put before it is wanted, or it is in memory then.
  if (const auto known = after_.find(number); known != after_.end()) {
    return kept_.contains(known->second) ? std::optional(known->second) : std::nullopt;
  }
  const auto here = kept_.lower_bound(number);
  if (here == kept_.begin()) return std::nullopt;
  return std::prev(here)->first;
}

void ActivationStore::read_ahead(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (last_wanted_ && *last_wanted_ != number && *last_wanted_ < kMaxLearned)
    after_[*last_wanted_] = number;
  last_wanted_ = number;
  std::optional<int64_t> next = guess(number);
  for (int i = 0; i < kAhead && next && *next != number; ++i) {
    kept_.at(*next)->prefetch();
    next = guess(*next);
  }
}

}  // namespace lockstep::parallel
