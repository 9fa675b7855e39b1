// What every backend must do, as checks that any program can run: `lockstep selftest` and the tests
// are made of them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

struct ConformanceCheck {
  std::string name;
  // Runs on all ranks of the group together, against plain tensor arithmetic. Throws what does not
  // hold.
  std::function<void(const Group&)> run;
};

// All of them, for a group of this backend. With `large`, also one of more than 2^31 elements
// (about 7 GB for two ranks).
std::vector<ConformanceCheck> conformance_checks(bool large = false);

}  // namespace lockstep::comm
