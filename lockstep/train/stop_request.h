// SPDX-License-Identifier: Apache-2.0
// SIGTERM and SIGINT as a question that a training loop asks.
#pragma once

#include <csignal>

namespace lockstep::train {

// From construction to destruction the two signals only raise a flag. One at a time in a process,
// because a signal handler can find nothing but globals.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // The signal that came, or 0.
  int signal() const;

 private:
  struct sigaction previous_term_ {};
  struct sigaction previous_int_ {};
};

}  // namespace lockstep::train
