// SPDX-License-Identifier: Apache-2.0
// `lockstep bench machine`: the half that starts the ranks. They run in lockstep-torch
// (machine_rank.h).
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int bench_machine(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
