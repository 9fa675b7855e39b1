// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int report(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
