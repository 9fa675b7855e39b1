// SPDX-License-Identifier: Apache-2.0
// A picture of what a search found.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/config/plan/timed_run.h"

namespace lockstep::cli {

// Time and memory of every layout, with the front as a line; below it, where the first layout has a
// pipeline, the timeline of its ranks.
std::string front_svg(const std::vector<config::Prediction>& found,
                      const std::vector<size_t>& front,
                      const std::optional<plan::Timeline>& timeline);

}  // namespace lockstep::cli
