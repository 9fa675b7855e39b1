// SPDX-License-Identifier: Apache-2.0
// The promise of a running operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "lockstep/core/clock.h"

namespace lockstep::comm {

class Group;

namespace detail {
class Pending;
}

// A value: copies share the operation. Thread safe, except that one thread at a time may wait.
// If the handle is dropped the operation completes all the same, and keeps its tensors and its
// group alive until then, or until its deadline; an error then shows in what is called next in the
// group. Under nccl, tensors on the device are not copied to the host, and wait() makes the calling
// thread's current stream wait for the operation instead of the thread.
class [[nodiscard]] Work {
 public:
  Work() = default;  // already done
  // `blocked` is what waiting times are added to, in nanoseconds; `record` is the operation's entry
  // in the flight recorder, 0 where a wait is not its end.
  explicit Work(std::shared_ptr<detail::Pending> pending,
                std::shared_ptr<std::atomic<int64_t>> blocked = nullptr, uint64_t record = 0)
      : pending_(std::move(pending)), blocked_(std::move(blocked)), record_(record) {}

  // Returns when the operation is complete, or will be for what the current stream does next.
  // Throws what went wrong: TimeoutError, PeerLost, MismatchError.
  void wait();
  // The results are there, or an error is. Becomes true without wait().
  bool done() const;

 private:
  std::shared_ptr<detail::Pending> pending_;
  std::shared_ptr<std::atomic<int64_t>> blocked_;
  uint64_t record_ = 0;
};

// While one is alive, this thread's time is blocked time of the group's job
// (Group::blocked_time()). For a thread that waits for another thread, which communicates. The
// group must outlive it.
class BlockedTime {
 public:
  explicit BlockedTime(const Group& group);
  // Adds to this counter of nanoseconds, if there is one.
  explicit BlockedTime(std::atomic<int64_t>* counter);
  ~BlockedTime();
  BlockedTime(const BlockedTime&) = delete;
  BlockedTime& operator=(const BlockedTime&) = delete;

 private:
  std::atomic<int64_t>* counter_;
  Clock::time_point start_;
};

// While one is alive, what this thread spends in operations and waits is not blocked time: a thread
// that does nothing else.
class ExcludeBlockedTime {
 public:
  ExcludeBlockedTime();
  ~ExcludeBlockedTime();
  ExcludeBlockedTime(const ExcludeBlockedTime&) = delete;
  ExcludeBlockedTime& operator=(const ExcludeBlockedTime&) = delete;
};

}  // namespace lockstep::comm
