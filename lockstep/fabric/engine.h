// SPDX-License-Identifier: Apache-2.0
// Runs the operations of one rank of a group whose members share memory.
//
// Collectives run one after the other in the order they were submitted; messages of each channel
// likewise, independent of the collectives and of other channels. The thread that needs a result
// drives: a small operation runs inside submit(), a waiting thread moves things on itself, and a
// progress thread does so while no other waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/fabric/crew.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/fabric/seat.h"

namespace lockstep::fabric {

// An operation that was submitted.
struct Ticket {
  Operation operation;
  std::shared_ptr<const void> memory;  // keeps what the operation reads and writes alive
  uint64_t sequence = 0;
  Clock::time_point started, finished;
  std::atomic<bool> done{false};
  std::exception_ptr error;  // set before done
  bool warned = false;
  Task task;
};

struct EngineOptions {
  // Empty while the rank is alive, else how it ended. Asked only while waiting for that rank.
  std::function<std::string(int rank)> probe = {};
  // Called by the driving thread for every operation that has ended well.
  std::function<void(const Ticket&)> on_done = {};
  milliseconds warn_after{2000};
  // Threads that the calling thread computes with, which share large operations while it waits for
  // one, if there are cores for those of all ranks. Empty: one.
  std::function<int()> threads = {};
};

// Thread safe.
class Engine {
 public:
  Engine(Seat seat, EngineOptions options);
  // Leaves the group; operations that are still running fail, here and at the peers that wait for
  // them.
  ~Engine();

  const Seat& seat() const { return seat_; }

  std::shared_ptr<Ticket> submit(Operation operation, std::shared_ptr<const void> memory);
  // Returns when the operation has ended; throws its error.
  void wait(Ticket& ticket);
  // The caller will not wait for its unhurried operation: the progress thread takes it over.
  void let_go();
  // Operations of all members fail from now on, with this reason.
  void abort(const std::string& why);

  // Nothing that was submitted is still running. Moves on what can be moved.
  bool is_idle();
  // Returns when that is so. Every operation has a deadline, so this has one too.
  void drain();

 private:
  using Queue = std::deque<std::shared_ptr<Ticket>>;

  Queue& queue_of(const Operation& operation);
  void start(Ticket& ticket);
  bool take_inbox();
  bool advance();
  bool advance(Queue& queue);
  void finish(Queue& queue, std::exception_ptr error);
  void drive(const std::function<bool()>& satisfied, int spins, bool may_sleep);
  bool drive_once(std::unique_lock<std::mutex>& lock);
  void sleep();
  void look_after(Ticket& ticket);
  void break_with(std::exception_ptr error);
  void progress_loop(std::stop_token stop);
  void wake_progress_thread();
  bool anything_ready();
  int helpers_for(const Operation& operation) const;

  Seat seat_;
  EngineOptions options_;
  long cores_;
  bool crowded_;
  int spin_limit_;
  Crew crew_;

  // Owned by the driver.
  Queue collectives_;
  std::map<std::pair<OpKind, int>, Queue> channels_;
  std::map<std::pair<OpKind, int>, uint64_t> channel_pieces_;
  std::exception_ptr broken_;
  Clock::time_point last_look_;

  std::mutex mutex_;  // guards what follows
  std::vector<std::shared_ptr<Ticket>> inbox_;
  std::atomic<bool> inbox_filled_{false};
  bool driving_ = false;
  int waiting_ = 0;
  int unfinished_ = 0;
  std::map<OpKind, uint64_t> next_sequence_;
  std::condition_variable_any work_arrived_;
  std::condition_variable work_done_;
  std::atomic<bool> stopping_{false};
  std::jthread progress_thread_;
};

}  // namespace lockstep::fabric
