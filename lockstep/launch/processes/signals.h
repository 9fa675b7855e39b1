// SPDX-License-Identifier: Apache-2.0
// Signals the launcher was sent, as something to wait for instead of something that interrupts.
#pragma once

#include <csignal>
#include <optional>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

// Thrown out of a wait before any rank runs.
struct Interrupted {
  int signal;
};

// From construction to the end of the process, the signals below are blocked in this thread and
// those it starts: a late one does not spoil the exit status. SIGPIPE is ignored: a reader of our
// output that went away is not our end.
class Signals {
 public:
  // `usr1_stops`: SIGUSR1 asks for an end too.
  explicit Signals(bool usr1_stops = false);
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return fd_.get(); }  // readable when one has come
  std::optional<int> take();
  // Lets time pass; throws Interrupted when a stop signal comes.
  void pause(milliseconds time);

  // SIGINT, SIGTERM, SIGHUP and SIGQUIT do.
  bool asks_to_stop(int signal) const;

 private:
  bool usr1_stops_;
  sigset_t set_{};
  Fd fd_;
};

}  // namespace lockstep::launch
