// SPDX-License-Identifier: Apache-2.0
// One logger: stderr, every line carries the rank, level from LOCKSTEP_LOG (trace debug info warn
// error off; default info).
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace lockstep::log {

// Names this process in every following line ("rank 3"). Thread ranks share a process: their
// messages name the rank.
void set_rank(int rank);

// A file that gets the lines of this log too. hold_lines() keeps them in memory until copy_to()
// says where they belong; an empty path ends the copy. SystemError where the file cannot be opened.
void hold_lines();
void copy_to(const std::string& path);
// A line for that file alone, of what the program shows elsewhere.
void copy_line(std::string_view line);

// Also called with each warning and error, on the thread that logs it, one at a time. Null: none.
void observe_warnings(std::function<void(const std::string& message)> observer);

void debug(std::string_view message);
void info(std::string_view message);
void warn(std::string_view message);
void error(std::string_view message);

}  // namespace lockstep::log
