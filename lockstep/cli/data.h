// SPDX-License-Identifier: Apache-2.0
// The command `lockstep data`: pack.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// `arguments` are those after "data". Returns the exit status; throws lockstep::Error.
int data(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
