// SPDX-License-Identifier: Apache-2.0
// Whether all ranks have called the same operation, found out before an engine gets it. Private to
// comm.
#pragma once

#include <functional>
#include <memory>

#include "lockstep/comm/control/operation_watchdog.h"
#include "lockstep/comm/serial_executor.h"

namespace lockstep::comm::detail {

// For groups whose engine does not compare. Ranks of one host compare on a board in shared memory,
// which costs about a microsecond and lets the thread that waits, or one of the board's, begin the
// operation. Ranks of several hosts exchange what they call by the engine itself, on a thread.
class CallConsistency {
 public:
  // Gathers one record of equal size from every rank; returns when it has.
  using Exchange = std::function<void(const std::shared_ptr<OperationWatchdog::Records>&)>;

  // Collective over the members.
  CallConsistency(const Membership& membership, OperationWatchdog& watchdog);

  bool has_board() const { return board_ != nullptr; }
  bool exchanges() const { return compares_ && !board_; }

  // Calls `start` when all ranks have called the same collective, for one operation after the
  // other, on any thread. `start` must not throw; it, and `exchange`, may own the group. The result
  // is done when it has been called, or never will be; it throws why. Null, and `start` has been
  // called, where nothing is compared. Posts must be in the order of the calls. Where ranks
  // exchange, the checksums of `verified` travel with the record, and what `start` throws breaks
  // the group.
  std::shared_ptr<Pending> post(fabric::Operation operation, uint64_t sequence,
                                std::function<void()> start, Exchange exchange,
                                std::shared_ptr<VerifiedOperation> verified = nullptr);
  // For a message that has been started: done when a recv's send is known to be right, or when a
  // send can be seen by its receiver. Only where there is a board.
  std::shared_ptr<Pending> post_message(fabric::Operation operation);

  // Nothing will be agreed on any more.
  void abort(const std::string& why);

 private:
  OperationWatchdog& watchdog_;
  bool compares_;
  std::shared_ptr<GroupImpl> board_;
  SerialExecutor executor_;
};

// A group of the members that only announces, where they share a host's memory; else, on all of
// them, null. Collective.
std::shared_ptr<GroupImpl> make_announcement_group(const Membership& membership);

}  // namespace lockstep::comm::detail
