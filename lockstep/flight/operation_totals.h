// SPDX-License-Identifier: Apache-2.0
// What the operations of a rank have cost, by kind, from its flight recorder.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/flight/page.h"

namespace lockstep::flight {

struct OperationTotal {
  int64_t count = 0, bytes = 0;
  int64_t flight_ns = 0;  // from the call to the end
  int64_t waited_ns = 0;  // in which a thread did nothing but wait for it: the rest is overlapped
};

// By the operation's name. Reads what was recorded since it read last, so it is called at least
// once for every kEntries operations; of more, the oldest are not counted.
class OperationTotals {
 public:
  void read(const Page& page);
  // What was read since it was taken last.
  std::map<std::string, OperationTotal> take() { return std::exchange(totals_, {}); }

 private:
  uint64_t next_ = 1;  // ticket
  std::map<std::string, OperationTotal> totals_;
};

}  // namespace lockstep::flight
