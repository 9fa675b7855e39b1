// SPDX-License-Identifier: Apache-2.0
// Private: not installed. The check behind validate(), for callers that know more about where the
// schedule comes from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule::detail {

// Ranks x micro-batches x chunks of a schedule, at most: what fits in memory with ease.
constexpr int64_t kMostPlaces = 1 << 22;
int64_t places(const Pipeline& pipeline);

struct Fault {
  int rank = -1;     // -1: of no rank
  std::string what;  // "B3.1 is there twice"
};

// The first rule that the schedule breaks.
std::optional<Fault> find_fault(const Schedule& schedule);

}  // namespace lockstep::schedule::detail
