// SPDX-License-Identifier: Apache-2.0
// Operations that MPI has, and the thread that brings them to an end. Private to mpi/.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/backends/mpi/communicator.h"
#include "lockstep/comm/backends/mpi/runtime.h"
#include "lockstep/comm/control/verified_operation.h"
#include "lockstep/core/clock.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm::mpi {

// What a thread or a poll brings to an end.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  Communicator::Running running;                  // empty for a large collective
  std::unique_ptr<detail::MessageHeader> header;  // of a message, where messages are checked
  std::shared_ptr<const void> memory;             // what MPI reads and writes
  std::function<void()> finish;                   // what is left to do when MPI is done
  bool begun = false;                             // MPI has it, or the thread
  bool dropped = false;                           // no thread will wait for it
  bool done = false;
  std::exception_ptr error;
  Clock::time_point finished;

  // Both with `mutex` held. One look at non-blocking requests is enough where they are done.
  void end(std::exception_ptr failure);
  void test();
};

// What the thread of a group shares with it, and has alone where MPI does not return, or not before
// the group is gone.
struct Worker {
  explicit Worker(std::unique_ptr<Communicator> communicator) : large(std::move(communicator)) {}
  void work();

  struct Large {
    std::function<void(const Communicator&)> run;
    std::shared_ptr<Progress> progress;
  };
  const std::unique_ptr<Communicator> large;
  std::mutex mutex;  // guards what follows
  std::condition_variable arrived;
  std::deque<Large> queue;
  // Messages, which may need a push while their owners compute, and operations that no thread waits
  // for any more.
  std::vector<std::shared_ptr<Progress>> in_flight;
  // Small collectives, which are over before the thread looks, unless their rank waits for
  // something else: another group, or what is compared, for which the others may wait for this.
  std::vector<std::shared_ptr<Progress>> small;
  bool busy = false, stopping = false, asleep = true;
  std::unique_ptr<Unfinished> unfinished;  // of a group that is gone
};

}  // namespace lockstep::comm::mpi
