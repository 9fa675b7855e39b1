// SPDX-License-Identifier: Apache-2.0
// `lockstep sample` and `lockstep eval`: what is done before libtorch is loaded.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int sample(const std::vector<std::string>& arguments);
int eval(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
