// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/stop_request.h"

namespace lockstep::train {
namespace {

volatile std::sig_atomic_t received = 0;

void note(int signal) { received = signal; }

}  // namespace

StopRequest::StopRequest() {
  received = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, &previous_term_);
  sigaction(SIGINT, &action, &previous_int_);
}

StopRequest::~StopRequest() {
  sigaction(SIGTERM, &previous_term_, nullptr);
  sigaction(SIGINT, &previous_int_, nullptr);
}

int StopRequest::signal() const { return received; }

}  // namespace lockstep::train
