// SPDX-License-Identifier: Apache-2.0
// Gloo writes to its sockets without asking for no signal: a peer that has gone would end the whole
// process.
#pragma once

#include <csignal>
#include <ctime>

namespace lockstep::comm::gloo {

// While it lives, a write to a closed socket on this thread is an error, not a signal; threads
// started meanwhile stay so. The process's own handling of the signal is left alone.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) != 0;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&pipe_, nullptr, &at_once);  // ours, if there is one
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

}  // namespace lockstep::comm::gloo
