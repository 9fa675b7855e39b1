// SPDX-License-Identifier: Apache-2.0
// Files of JSON lines, and standard input, that a command is given.
#pragma once

#include <functional>
#include <string>

#include "lockstep/io/json.h"

namespace lockstep::cli {

// ConfigError unless the option's file can be read; empty, and "-" for standard input, can.
void require_file(const std::string& option, const std::string& path);
// All of a file, or of standard input for "-".
std::string read_input(const std::string& path);

// Calls `take` with each line that is not blank, and with the place of it: "FILE:LINE". ConfigError
// for a line that is not JSON.
void for_each_json_line(
    const std::string& text, const std::string& file,
    const std::function<void(const io::OrderedJson& json, const std::string& place)>& take);

}  // namespace lockstep::cli
