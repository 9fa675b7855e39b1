// Private: not installed. The check behind validate(), for callers that know more about where the
// schedule comes from.
#pragma once

#include <optional>
#include <string>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule::detail {

struct Fault {
  int rank = -1;     // -1: of no rank
  std::string what;  // "B3.1 is there twice"
};

// The first rule that the schedule breaks.
std::optional<Fault> find_fault(const Schedule& schedule);

}  // namespace lockstep::schedule::detail
