// SPDX-License-Identifier: Apache-2.0
// The command `lockstep run`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// `arguments` are those after "run". Returns the exit status; throws lockstep::Error.
int run(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
