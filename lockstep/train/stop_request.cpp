// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/stop_request.h"

#include <atomic>

namespace lockstep::train {
namespace {

volatile std::sig_atomic_t received = 0;
std::atomic<int> alive{0};

void note(int signal) { received = signal; }

}  // namespace

StopRequest::StopRequest() {
  if (alive++ == 0) received = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
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

int StopRequest::signal() const { return received; }

}  // namespace lockstep::train
