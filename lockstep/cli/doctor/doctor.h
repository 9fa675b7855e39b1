// SPDX-License-Identifier: Apache-2.0
// `lockstep doctor`: what this machine offers a training run, and what will hurt it.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// The half without libtorch, which starts the other. 1 if training is impossible here, else 0.
int doctor(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
