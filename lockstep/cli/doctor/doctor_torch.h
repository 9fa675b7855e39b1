// SPDX-License-Identifier: Apache-2.0
// The half of `lockstep doctor` that needs libtorch.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// Prints what libtorch has and how fast it is here. 1 if it cannot compute, else 0.
int doctor_torch(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
