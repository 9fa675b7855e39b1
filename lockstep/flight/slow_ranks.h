// SPDX-License-Identifier: Apache-2.0
// Which ranks compute much longer than the others, which wait for them.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::flight {

struct SlowRank {
  int rank = 0;
  int64_t busy_ns = 0, usual_ns = 0;  // of the last step; usual: the median of the other ranks

  double ratio() const;
};

// A rank is slow when it has computed at least 1.8 times as long as the others in six steps in a
// row, or 3 times as long in three, and at least 20 ms longer.
class SlowRanks {
 public:
  // What each rank has computed in one step: its time without waiting for others. Returns the ranks
  // that are slow now.
  std::vector<SlowRank> judge(const std::vector<int64_t>& busy_ns);

 private:
  std::vector<int> counts_;  // of each rank
};

}  // namespace lockstep::flight
