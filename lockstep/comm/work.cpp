#include "lockstep/comm/work.h"

#include "lockstep/comm/backend.h"
#include "lockstep/core/trace.h"

namespace lockstep::comm {

void Work::wait() {
  if (!pending_) return;
  const trace::Span span("wait", "wait");
  const detail::BlockedTime time(blocked_.get());
  pending_->wait();
}

bool Work::done() const { return !pending_ || pending_->done(); }

}  // namespace lockstep::comm
