// SPDX-License-Identifier: Apache-2.0
// epoll with a handler for each descriptor.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

// One thread's. Handlers run in the order in which descriptors became ready.
class Poller {
 public:
  using Handler = std::function<void()>;

  Poller();
  // Throws SystemError; false for a plain file, which is always ready and cannot be watched.
  bool watch(int fd, uint32_t events, Handler handler);
  void change(int fd, uint32_t events);
  // Must come before the descriptor is closed. Its handler is not called any more, not even for
  // events already seen.
  void forget(int fd);
  // Waits for events or the timeout and calls the handlers. An interruption counts as a timeout.
  void wait(milliseconds timeout);

 private:
  struct Watch {
    uint32_t id;
    std::shared_ptr<Handler> handler;
  };
  Fd epoll_;
  uint32_t next_id_ = 0;
  std::unordered_map<int, Watch> watches_;
};

}  // namespace lockstep::launch
