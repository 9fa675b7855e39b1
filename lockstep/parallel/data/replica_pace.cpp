// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/replica_pace.h"

#include <algorithm>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

// How far a replica that begins a step may be ahead of the slowest.
int64_t largest_allowed_lead(const SyncMode& mode) {
  if (const auto* bounded = std::get_if<BoundedStaleness>(&mode)) return bounded->max;
  return std::holds_alternative<Asynchronous>(mode) ? std::numeric_limits<int64_t>::max() : 0;
}

SyncMode checked(SyncMode mode) {
  if (largest_allowed_lead(mode) < 0) {
    throw ConfigError(format("[DataParallel] BoundedStaleness is {}, must be at least 0",
                             largest_allowed_lead(mode)));
  }
  return mode;
}

}  // namespace

ReplicaPace::ReplicaPace(size_t replicas, SyncMode mode)
    : requested_(checked(mode)),
      active_(mode),
      states_(replicas, State::computing),
      stats_{.steps = std::vector<int64_t>(replicas), .waits = std::vector<int64_t>(replicas)} {}

void ReplicaPace::set_mode(SyncMode mode) {
  const std::lock_guard lock(mutex_);
  requested_ = checked(mode);
  if (std::holds_alternative<Synchronous>(active_)) return;
  active_ = requested_;
  changed_.notify_all();
}

SyncMode ReplicaPace::mode() const {
  const std::lock_guard lock(mutex_);
  return requested_;
}

bool ReplicaPace::synchronous() const {
  const std::lock_guard lock(mutex_);
  return std::holds_alternative<Synchronous>(active_);
}

RunStats ReplicaPace::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void ReplicaPace::start() {
  const std::lock_guard lock(mutex_);
  active_ = requested_;
  stopped_ = false;
  std::fill(states_.begin(), states_.end(), State::computing);
  stats_ = {.steps = std::vector<int64_t>(states_.size()),
            .waits = std::vector<int64_t>(states_.size())};
}

void ReplicaPace::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

bool ReplicaPace::begin(size_t replica) {
  std::unique_lock lock(mutex_);
  const auto lead = [&] { return stats_.steps[replica] - slowest(); };
  const auto may_begin = [&] {
    return stopped_ ||
           (states_[replica] == State::computing && lead() <= largest_allowed_lead(active_));
  };
  if (!may_begin()) {
    ++stats_.waits[replica];
    changed_.wait(lock, may_begin);
  }
  if (stopped_) return false;
  stats_.largest_lead = std::max(stats_.largest_lead, lead());
  return true;
}

std::vector<size_t> ReplicaPace::finish(size_t replica) {
  const std::lock_guard lock(mutex_);
  if (!std::holds_alternative<Synchronous>(active_)) {
    states_[replica] = State::applying;
    return {replica};
  }
  states_[replica] = State::holding;
  const int64_t step = stats_.steps[replica];
  std::vector<size_t> together;
  for (size_t i = 0; i < states_.size(); ++i) {
    // Replicas that came into Synchronous ahead of others have applied this step long ago.
    if (stats_.steps[i] > step) continue;
    if (stats_.steps[i] < step || states_[i] == State::computing) return {};
    if (states_[i] == State::holding) together.push_back(i);
  }
  for (const size_t i : together) states_[i] = State::applying;
  return together;
}

void ReplicaPace::applied(const std::vector<size_t>& replicas) {
  const std::lock_guard lock(mutex_);
  for (const size_t i : replicas) {
    states_[i] = State::computing;
    ++stats_.steps[i];
  }
  changed_.notify_all();
}

void ReplicaPace::adopt_mode() {
  const std::lock_guard lock(mutex_);
  active_ = requested_;
}

int64_t ReplicaPace::slowest() const {
  return *std::min_element(stats_.steps.begin(), stats_.steps.end());
}

}  // namespace lockstep::parallel::detail
