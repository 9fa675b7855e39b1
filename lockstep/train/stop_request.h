// SPDX-License-Identifier: Apache-2.0
// The signals that ask for an end, as a question that a training loop asks.
#pragma once

#include <array>
#include <csignal>

namespace lockstep::train {

// What ranks are to do at the end of a step. Of two requests the later of these wins.
enum class Stop {
  none,
  resize,  // end, because the job continues with another number of ranks
  end
};

// From construction to destruction SIGTERM, SIGINT, SIGUSR1 and SIGHUP only raise a flag; SIGHUP
// stays ignored under nohup. Those that are alive at one time share the flag: a signal that came
// during the first is known to a second.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // By the signals that came so far. SIGTERM with launch::kStopToResize asks for Stop::resize.
  Stop asked() const;

 private:
  static constexpr std::array kSignals{SIGTERM, SIGINT, SIGUSR1, SIGHUP};
  std::array<struct sigaction, kSignals.size()> previous_{};
};

}  // namespace lockstep::train
