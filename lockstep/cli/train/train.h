// SPDX-License-Identifier: Apache-2.0
// `lockstep train` and `lockstep sample`: the half that looks at what it is asked for, and starts
// the ranks.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int train(const std::vector<std::string>& arguments);
int sample(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
