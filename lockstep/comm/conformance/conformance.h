// SPDX-License-Identifier: Apache-2.0
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

// All of them, with tensors on `device` ("cpu", "cuda:0"). With `large`, also one of more than 2^31
// elements (about 7 GB for two ranks).
std::vector<ConformanceCheck> conformance_checks(bool large = false,
                                                 const std::string& device = "cpu");

// The library that a backend stands on, as it names itself ("Open MPI v4.1.4"); empty where there
// is none, or none that says. For reports.
std::string backend_version(const std::string& name);

}  // namespace lockstep::comm
