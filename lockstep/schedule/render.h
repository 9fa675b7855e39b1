// Schedules as files and as text.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule {

// "placement,loop" or "placement,v", then a line per rank with its actions, separated by commas.
std::string to_csv(const Schedule& schedule);

// The opposite; the kind is file, the numbers are those that the actions have. Throws ConfigError
// with the path, the line and the action where the text or the schedule is not valid.
Schedule from_csv(std::string_view text, const std::string& path);
Schedule read_csv(const std::string& path);

}  // namespace lockstep::schedule
