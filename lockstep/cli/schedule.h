// SPDX-License-Identifier: Apache-2.0
// The command `lockstep schedule`: pipeline schedules, simulated or as a run's trace has them.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// `arguments` are those after "schedule". Returns the exit status; throws lockstep::Error.
int schedule(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
