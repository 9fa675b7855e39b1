// SPDX-License-Identifier: Apache-2.0
// `lockstep selftest`: the half that starts the ranks. They run in lockstep-torch
// (selftest_rank.h).
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int selftest(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
