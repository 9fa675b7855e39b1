// SPDX-License-Identifier: Apache-2.0
// `lockstep bench collectives`: the half that starts the ranks. They run in lockstep-torch
// (collectives_rank.h).
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int bench_collectives(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
