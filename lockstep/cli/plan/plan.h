// SPDX-License-Identifier: Apache-2.0
// The command `lockstep plan`: what a training run will take, before it is started.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// `arguments` are those after "plan". Returns the exit status; throws lockstep::Error.
int plan(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
