// SPDX-License-Identifier: Apache-2.0
// A thread that waits for an event, as the trace shows it. Private: not installed.
#pragma once

#include "lockstep/core/trace.h"
#include "lockstep/memory/queue.h"

namespace lockstep::memory::detail {

// A span where there is something to wait for. Throws the event's error in any case.
inline void wait_in_thread(const Event& event) {
  if (event.passed()) {
    event.wait();
  } else {
    const trace::Span span("wait", "wait");
    event.wait();
  }
}

}  // namespace lockstep::memory::detail
