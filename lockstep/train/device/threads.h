// SPDX-License-Identifier: Apache-2.0
// The compute threads of a rank. Private: not installed.
#pragma once

#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

// Returns the number of compute threads in words. A sum over threads depends on it, so a
// reproducible run must have the same on every rank. Ranks that share an affinity mask are bound to
// their share of it: unbound ranks that wait for each other are moved onto one core.
std::string set_threads(const config::TrainConfig& config, const comm::Group& group);

}  // namespace lockstep::train
