// SPDX-License-Identifier: Apache-2.0
// How a group's operations appear in a trace: collectives on one row, sends and receives on one row
// for each peer.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/core/trace.h"

namespace lockstep::comm::detail {

// Thread safe.
class OperationTrace {
 public:
  // Rows begin with `engine`; `strategy` where it is not the backend's own.
  explicit OperationTrace(const Membership& membership, std::string engine = "comm",
                          std::string strategy = {});
  void add(const fabric::Operation& operation, uint64_t sequence, Clock::time_point start,
           Clock::time_point end);

 private:
  std::string group_, engine_, strategy_;
  std::vector<int> members_;
  int world_rank_, size_;
  std::mutex mutex_;
  std::map<std::pair<fabric::OpKind, int>, trace::Row> rows_;
};

}  // namespace lockstep::comm::detail
