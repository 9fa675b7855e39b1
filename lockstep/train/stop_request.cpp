// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/stop_request.h"

#include <atomic>

#include "lockstep/launch/recovery_memory.h"

namespace lockstep::train {
namespace {

volatile std::sig_atomic_t asked_to_end = 0, asked_to_resize = 0;
std::atomic<int> alive{0};

void note(int /*signal*/, siginfo_t* info, void* /*context*/) {
  if (info->si_code == SI_QUEUE && info->si_value.sival_int == launch::kStopToResize) {
    asked_to_resize = 1;
  } else {
    asked_to_end = 1;
  }
}

}  // namespace

StopRequest::StopRequest() {
  if (alive++ == 0) {
    asked_to_end = 0;
    asked_to_resize = 0;
  }
  struct sigaction action {};
  action.sa_sigaction = note;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    if (kSignals[i] == SIGHUP && previous_[i].sa_handler == SIG_IGN) continue;
    sigaction(kSignals[i], &action, nullptr);
  }
}

StopRequest::~StopRequest() {
  --alive;
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

Stop StopRequest::asked() const {
  if (asked_to_end != 0) return Stop::end;
  return asked_to_resize != 0 ? Stop::resize : Stop::none;
}

}  // namespace lockstep::train
