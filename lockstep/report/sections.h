// SPDX-License-Identifier: Apache-2.0
// The sections of a page. Each returns HTML, empty where the run has nothing to show.
#pragma once

#include <string>
#include <vector>

#include "lockstep/report/run.h"

namespace lockstep::report {

std::string tiles(const Run& run);
std::string findings_section(const Run& run);
std::string curves_section(const std::vector<Run>& runs);
std::string time_section(const Run& run, size_t index);
std::string ranks_section(const Run& run, size_t index);
std::string pipeline_section(const Run& run);
std::string memory_section(const Run& run);
std::string health_section(const Run& run, size_t index);
std::string events_section(const Run& run);
std::string samples_section(const Run& run);
std::string settings_section(const std::vector<Run>& runs);

// Of the ranks' times and of the health of layers, at most so many cells each.
inline constexpr size_t kMostMapRows = 48, kMostMapColumns = 64;
struct MapData {
  std::vector<std::string> rows = {}, columns = {};
  std::vector<std::vector<double>> values = {};
};
MapData map_of_ranks(const Run& run);
MapData map_of_health(const Run& run, const std::string& quantity);

}  // namespace lockstep::report
