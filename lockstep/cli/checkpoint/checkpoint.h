// SPDX-License-Identifier: Apache-2.0
// `lockstep checkpoint`.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int checkpoint(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
