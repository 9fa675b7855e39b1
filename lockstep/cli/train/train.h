// SPDX-License-Identifier: Apache-2.0
// `lockstep train`: the half that looks at what it is asked for, and starts the ranks.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// Variables of rank 0's process: what RunFolder::open() has returned, or why there is no folder.
inline constexpr const char* kSettings = "LOCKSTEP_RUN_SETTINGS";
inline constexpr const char* kFailure = "LOCKSTEP_RUN_FAILURE";

int train(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
