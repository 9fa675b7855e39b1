// SPDX-License-Identifier: Apache-2.0
// Operations that an engine runs by itself, on threads of its own, and reports the end of.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/comm/op_trace.h"

namespace lockstep::comm::detail {

// Counts down as the parts of an operation end; keeps the first error. Thread safe.
class Completion {
 public:
  // `finish` runs on the thread of the last part, if all have gone well, before that is seen. It
  // may be empty.
  explicit Completion(size_t parts, std::function<void()> finish = {})
      : parts_(parts), finish_(std::move(finish)) {}
  void part_done(std::exception_ptr error);
  // True when all is over, well or not.
  bool wait_for(milliseconds time);
  // More parts are to come, and more is left to do when all are there. For who has a part in hand.
  void expect(size_t parts, std::function<void()> finish);
  bool has_begun() const;  // a part has ended, or more are expected
  bool done() const;
  std::exception_ptr error() const;
  Clock::time_point finished() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t parts_;
  bool has_begun_ = false;
  std::function<void()> finish_;
  Clock::time_point finished_;
  std::exception_ptr error_;
};

bool is_mismatch(const std::exception_ptr& error);

// A group's operation in flight: waits with the group's watchdog, turns the engine's errors into
// ours, and tells the group when it is broken.
class WatchedPending final : public Pending {
 public:
  struct Owner {
    std::shared_ptr<GroupImpl> group;  // an operation in flight keeps its group
    OperationWatchdog& watchdog;
    OperationTrace& trace;
    std::function<void(const std::string& why)> on_broken;
  };
  // `agreed` is over when the operation has begun, or never will; null where it has.
  WatchedPending(Owner owner, fabric::Operation operation, uint64_t sequence,
                 Clock::time_point started, std::shared_ptr<Completion> completion,
                 std::shared_ptr<const void> memory, std::shared_ptr<Pending> agreed = nullptr)
      : owner_(std::move(owner)),
        operation_(std::move(operation)),
        sequence_(sequence),
        started_(started),
        completion_(std::move(completion)),
        memory_(std::move(memory)),
        agreed_(std::move(agreed)) {}

  void wait() override;
  bool done() const override {
    if (ended_) return true;
    const bool will_not_begin = agreed_ && agreed_->done() && !completion_->has_begun();
    return will_not_begin || completion_->done();
  }

 private:
  [[noreturn]] void explain(const std::exception_ptr& error) const;

  Owner owner_;
  fabric::Operation operation_;
  uint64_t sequence_;
  Clock::time_point started_;
  std::shared_ptr<Completion> completion_;
  std::shared_ptr<const void> memory_;
  std::shared_ptr<Pending> agreed_;
  bool ended_ = false;
};

}  // namespace lockstep::comm::detail
