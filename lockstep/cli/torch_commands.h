// SPDX-License-Identifier: Apache-2.0
// The commands whose ranks run in lockstep-torch: selftest and bench collectives. Here is the half
// that starts those ranks.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int selftest(const std::vector<std::string>& arguments);
int bench_collectives(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
