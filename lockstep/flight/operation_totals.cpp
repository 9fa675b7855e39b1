// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/operation_totals.h"

#include <algorithm>
#include <cstring>

#include "lockstep/core/dtype.h"

namespace lockstep::flight {

void OperationTotals::read(const Page& page) {
  const uint64_t end = page.next.load(std::memory_order_acquire) + 1;
  next_ = std::max(next_, end > kEntries ? end - kEntries : 1);
  for (; next_ < end; ++next_) {
    const Entry& entry = page.entries[(next_ - 1) % kEntries];
    const int64_t ended = entry.ended.load(std::memory_order_acquire);
    if (entry.ticket.load(std::memory_order_acquire) != next_) continue;
    const int64_t waited = entry.waited.load(std::memory_order_relaxed);
    // One that is in flight at the end of a step is not counted.
    if (ended == 0) continue;
    OperationTotal& total =
        totals_[std::string(entry.operation, strnlen(entry.operation, sizeof entry.operation))];
    ++total.count;
    total.bytes += entry.count * static_cast<int64_t>(size_of(static_cast<DType>(entry.dtype)));
    total.flight_ns += ended - entry.began;
    if (waited != 0) total.waited_ns += std::max<int64_t>(0, ended - waited);
  }
}

}  // namespace lockstep::flight
