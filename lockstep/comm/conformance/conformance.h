// SPDX-License-Identifier: Apache-2.0
// What every backend must do, as checks: `lockstep selftest` and the tests are made of them.
// Private: custom_backend.h declares what users call.
#pragma once

#include <string>

#include "lockstep/comm/custom_backend.h"

namespace lockstep::comm {

// The library that a backend stands on, as it names itself ("Open MPI v4.1.4"); empty where there
// is none, or none that says. For reports.
std::string backend_version(const std::string& name);

}  // namespace lockstep::comm
