// SPDX-License-Identifier: Apache-2.0
// `lockstep bench machine`: what each rank does.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

int bench_machine_rank(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
