// SPDX-License-Identifier: Apache-2.0
// One logger: stderr, every line carries the rank, level from LOCKSTEP_LOG (trace debug info warn
// error off; default info).
#pragma once

#include <string_view>

namespace lockstep::log {

// Names this process in every following line ("rank 3"). Thread ranks share a process: their
// messages name the rank.
void set_rank(int rank);

void debug(std::string_view message);
void info(std::string_view message);
void warn(std::string_view message);
void error(std::string_view message);

}  // namespace lockstep::log
