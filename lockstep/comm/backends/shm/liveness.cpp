// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/shm/liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace lockstep::comm::shm {

Liveness::Liveness(std::shared_ptr<fabric::Board> board)
    : board_(std::move(board)), processes_(static_cast<size_t>(board_->size())) {}

std::string Liveness::death_of(int rank) {
  const fabric::Slot& slot = board_->slot(rank);
  if (slot.state.load(std::memory_order_acquire) != fabric::SlotState::joined) return {};
  const auto pid = static_cast<pid_t>(slot.pid);
  if (pid == getpid()) return {};
  Fd& process = processes_[static_cast<size_t>(rank)];
  // A pid descriptor sees the end of a process also before its exit status is collected.
  if (!process.valid()) process = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (process.valid()) {
    pollfd item{process.get(), POLLIN, 0};
    return poll(&item, 1, 0) > 0 ? "has died" : "";
  }
  if (errno == ESRCH || kill(pid, 0) != 0) return "has died";
  return {};
}

}  // namespace lockstep::comm::shm
