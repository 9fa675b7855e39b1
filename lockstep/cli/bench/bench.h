// SPDX-License-Identifier: Apache-2.0
// The command `lockstep bench`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int bench(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
