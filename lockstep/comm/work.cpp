// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/work.h"

#include "lockstep/comm/backend.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::comm {
namespace {

// Of the thread, because that is what waits.
int& exclusion_depth() {
  thread_local int depth = 0;
  return depth;
}

}  // namespace

ExcludeBlockedTime::ExcludeBlockedTime() { ++exclusion_depth(); }
ExcludeBlockedTime::~ExcludeBlockedTime() { --exclusion_depth(); }

BlockedTime::BlockedTime(const Group& group)
    : BlockedTime(detail::impl_of(group).membership().world->blocked.get()) {}

BlockedTime::BlockedTime(std::atomic<int64_t>* counter)
    : counter_(exclusion_depth() == 0 ? counter : nullptr), start_(Clock::now()) {}

BlockedTime::~BlockedTime() {
  if (counter_ != nullptr) {
    *counter_ +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }
}

void Work::wait() {
  if (!pending_) return;
  const trace::Span span("wait", "wait",
                         trace::enabled() && record_ != 0 ? format("\"ticket\":{}", record_) : "");
  const BlockedTime time(blocked_.get());
  flight::wait(record_);
  try {
    pending_->wait();
  } catch (const std::exception& failure) {
    flight::fail(failure.what());
    throw;
  }
  flight::end(record_, Clock::now());
}

bool Work::done() const { return !pending_ || pending_->done(); }

}  // namespace lockstep::comm
