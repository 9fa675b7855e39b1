// Operations that an engine runs by itself, on threads of its own, and reports the end of.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

#include "lockstep/comm/op_trace.h"
#include "lockstep/comm/watch.h"

namespace lockstep::comm::detail {

// Counts down as the parts of an operation end; keeps the first error. Thread safe.
class Completion {
 public:
  explicit Completion(size_t parts) : parts_(parts) {}
  void part_done(std::exception_ptr error);
  // True when all is over, well or not.
  bool wait_for(milliseconds time);
  bool done() const;
  std::exception_ptr error() const;
  Clock::time_point finished() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t parts_;
  Clock::time_point finished_;
  std::exception_ptr error_;
};

// A group's operation in flight: waits with the group's watch, turns the engine's errors into ours,
// and tells the group when it is broken.
class WatchedPending final : public Pending {
 public:
  struct Owner {
    std::shared_ptr<GroupImpl> group;  // an operation in flight keeps its group
    Watch& watch;
    OperationTrace& trace;
    std::function<void()> on_broken;
  };
  // `finish` runs on the waiting thread when all has gone well; it may be empty.
  WatchedPending(Owner owner, fabric::Operation operation, uint64_t sequence,
                 Clock::time_point started, std::shared_ptr<Completion> completion,
                 std::shared_ptr<const void> memory, std::function<void()> finish)
      : owner_(std::move(owner)),
        operation_(std::move(operation)),
        sequence_(sequence),
        started_(started),
        completion_(std::move(completion)),
        memory_(std::move(memory)),
        finish_(std::move(finish)) {}

  void wait() override;
  bool done() const override { return ended_ || (!finish_ && completion_->done()); }

 private:
  [[noreturn]] void explain(const std::exception_ptr& error) const;

  Owner owner_;
  fabric::Operation operation_;
  uint64_t sequence_;
  Clock::time_point started_;
  std::shared_ptr<Completion> completion_;
  std::shared_ptr<const void> memory_;
  std::function<void()> finish_;
  bool ended_ = false;
};

}  // namespace lockstep::comm::detail
