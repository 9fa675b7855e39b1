// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/signals.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/core/error.h"

namespace lockstep::launch {

Signals::Signals(bool usr1_stops) : usr1_stops_(usr1_stops) {
  sigemptyset(&set_);
  for (const int number : {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD}) {
    sigaddset(&set_, number);
    // An ignored signal would never reach the descriptor; and SIGCHLD, ignored by our parent, would
    // have the ranks reaped unseen.
    signal(number, SIG_DFL);
  }
  // nohup asks us to live on without a terminal.
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set_, SIGHUP);
  signal(SIGPIPE, SIG_IGN);
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  fd_ = Fd(signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_.valid()) throw SystemError("signalfd", errno);
}

std::optional<int> Signals::take() {
  signalfd_siginfo info{};
  if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

void Signals::pause(milliseconds time) {
  const Deadline deadline(time);
  do {
    const auto left = deadline.left();
    const timespec wait{left.count() / 1000, left.count() % 1000 * 1'000'000};
    const int number = sigtimedwait(&set_, nullptr, &wait);
    if (number > 0 && asks_to_stop(number)) throw Interrupted{number};
  } while (!deadline.passed());
}

bool Signals::asks_to_stop(int signal) const {
  return signal != SIGUSR2 && signal != SIGCHLD && (signal != SIGUSR1 || usr1_stops_);
}

}  // namespace lockstep::launch
