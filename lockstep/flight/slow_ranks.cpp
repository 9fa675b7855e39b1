// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/slow_ranks.h"

#include <algorithm>

namespace lockstep::flight {
namespace {

constexpr double kSlow = 1.8, kVerySlow = 3;
constexpr int kSlowSteps = 6, kVerySlowSteps = 3;
constexpr int64_t kSlowNs = 20'000'000;

}  // namespace

double SlowRank::ratio() const {
  return static_cast<double>(busy_ns) / static_cast<double>(std::max<int64_t>(1, usual_ns));
}

std::vector<SlowRank> SlowRanks::judge(const std::vector<int64_t>& busy_ns) {
  std::vector<SlowRank> slow;
  if (busy_ns.size() < 2) return slow;
  counts_.resize(busy_ns.size());
  std::vector<int64_t> sorted = busy_ns;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < busy_ns.size(); ++i) {
    // The median of the others: of the sorted values without this one.
    const size_t middle = (busy_ns.size() - 1) / 2;
    const bool before = busy_ns[i] <= sorted[middle];
    const SlowRank rank{static_cast<int>(i), busy_ns[i], sorted[before ? middle + 1 : middle]};
    if (rank.ratio() < kSlow || rank.busy_ns - rank.usual_ns < kSlowNs) {
      counts_[i] = 0;
      continue;
    }
    counts_[i] += rank.ratio() >= kVerySlow ? kSlowSteps / kVerySlowSteps : 1;
    if (counts_[i] >= kSlowSteps) slow.push_back(rank);
  }
  return slow;
}

}  // namespace lockstep::flight
