// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/work.h"

#include "lockstep/comm/backend.h"
#include "lockstep/core/trace.h"

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
bool detail::BlockedTime::is_counted() { return exclusion_depth() == 0; }

void Work::wait() {
  if (!pending_) return;
  const trace::Span span("wait", "wait");
  const detail::BlockedTime time(blocked_.get());
  pending_->wait();
}

bool Work::done() const { return !pending_ || pending_->done(); }

}  // namespace lockstep::comm
