// SPDX-License-Identifier: Apache-2.0
// `lockstep selftest`: the conformance checks of the communication layer, on the user's machine.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// What one rank does, in lockstep-torch.
int selftest_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
