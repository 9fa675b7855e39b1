// SPDX-License-Identifier: Apache-2.0
// parallel.auto: the layout of a run, before its ranks are started.
#pragma once

#include <string>
#include <vector>

#include "lockstep/config/train_arguments.h"

namespace lockstep::cli {

// The flags of the layout that is predicted to be fastest and, with parallel.try, was the fastest
// of the first ones in a few steps. Says on stderr what it chose and why. ConfigError where none
// fits. `arguments` are those of the run, which the trials begin as it would.
std::vector<std::string> choose_layout(const config::TrainArguments& parsed,
                                       const std::vector<std::string>& arguments, int world);

}  // namespace lockstep::cli
