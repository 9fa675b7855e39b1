// SPDX-License-Identifier: Apache-2.0
// The checkpoint that a configuration names. Private: not installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/group.h"

namespace lockstep::train {

// A damaged one is refused (ConfigError), with those that could be named instead. Collective.
checkpoint::Loaded load_named(const std::string& name,
                              const std::vector<checkpoint::NamedSlice>& slices,
                              const comm::Group& world, const checkpoint::LoadOptions& options);

}  // namespace lockstep::train
