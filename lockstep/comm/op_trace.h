// How a group's operations appear in a trace: collectives on one row, sends and receives on one row
// for each peer.
#pragma once

#include <map>
#include <mutex>

#include "lockstep/comm/backend.h"
#include "lockstep/core/trace.h"

namespace lockstep::comm::detail {

// Thread safe.
class OperationTrace {
 public:
  explicit OperationTrace(const Membership& membership);
  void add(const fabric::Operation& operation, uint64_t sequence, Clock::time_point start,
           Clock::time_point end);

 private:
  std::string group_;
  int world_rank_, size_;
  std::mutex mutex_;
  std::map<std::pair<fabric::OpKind, int>, trace::Row> rows_;
};

}  // namespace lockstep::comm::detail
