// SPDX-License-Identifier: Apache-2.0
// Operations of one communicator on their way: a thread watches them, so that errors, deadlines and
// lost peers are found even if no thread waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/comm/backends/nccl/communicator.h"
#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/serial_executor.h"

namespace lockstep::comm::nccl {

// Events are kept for the next user: to make one takes longer than to record it. Thread safe.
class Events : public std::enable_shared_from_this<Events> {
 public:
  using Handle = std::shared_ptr<CUevent_st>;
  explicit Events(const Runtime& runtime) : runtime_(runtime) {}
  ~Events();
  // On the calling thread's device.
  Handle take(bool timed);

 private:
  const Runtime& runtime_;
  std::mutex mutex_;
  std::vector<CUevent_st*> free_[2];  // without times, with
};

// One operation. What may change after it was handed in belongs to the stream.
struct Ticket {
  fabric::Operation operation;
  uint64_t sequence = 0;
  std::shared_ptr<const void> memory = {};       // what it reads and writes
  std::shared_ptr<detail::Pending> agreed = {};  // by the ranks: to be waited for before the launch
  CUstream_st* from = nullptr;                   // the caller's stream, which it comes after
  Events::Handle ready = {}, begin = {}, done = {};
  bool launched = false;
};

class NcclStream {
 public:
  struct Options {
    detail::OperationWatchdog& watchdog;
    detail::OperationTrace& trace;
    // What comes before an operation that the stream's thread launches: it may wait.
    std::function<void(const Ticket&)> prepare = {};
    // Breaks the group: aborts all streams, this one too.
    std::function<void(std::exception_ptr)> fail;
  };
  NcclStream(std::shared_ptr<Communicator> communicator, Options options);
  ~NcclStream();

  // Returns when what was handed in is over. Nothing may be handed in afterwards.
  void finish();

  // Launched in the call, or by the stream's thread; one after the other either way. It comes after
  // what the caller's stream has been given so far.
  std::shared_ptr<Ticket> launch(Ticket ticket);
  std::shared_ptr<Ticket> post(Ticket ticket);
  bool has_posted() const;  // some that the thread has not launched yet

  // Makes the caller's stream wait, and lets go of the memory as soon as that is right.
  void wait(Ticket& ticket);
  bool done(const Ticket& ticket) const;

  void abort() noexcept;
  // Connects the communicator with the others that have this id; the operation is the first that
  // needs it.
  void connect(const UniqueId& id, int rank, int size, const fabric::Operation& operation,
               uint64_t sequence);

  Communicator& communicator() { return *communicator_; }
  const std::shared_ptr<Communicator>& shared_communicator() { return communicator_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void settle(const fabric::Operation& operation, uint64_t sequence);
  std::shared_ptr<Ticket> accept(Ticket ticket);
  void start(Ticket& ticket);
  void run(const std::stop_token& stop);
  bool launch_posted(Lock& lock);
  void follow(const Ticket& ticket);
  bool has_passed(const Events::Handle& event, milliseconds time, milliseconds& pause,
                  const Ticket& ticket);
  void retire(Ticket& ticket);
  void let_go();
  Clock::time_point time_of(const Events::Handle& event) const;
  void set_base();

  const std::shared_ptr<Communicator> communicator_;
  const Runtime& runtime_;
  Options options_;
  const std::shared_ptr<Events> events_;
  std::mutex launching_;  // one at a time
  Events::Handle base_;   // an event whose time is known on our clock, where there is a trace
  Clock::time_point base_time_;
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<Ticket>> posted_, in_flight_;
  bool aborted_ = false;
  detail::SerialExecutor frees_;
  bool has_frees_ = false;  // of the thread
  std::jthread thread_;
};

}  // namespace lockstep::comm::nccl
