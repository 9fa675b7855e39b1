// SPDX-License-Identifier: Apache-2.0
// Reading a command's options. CLI11 parses them; help and messages are worded here, because
// CLI11's own differ between its releases.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

// Fills what the app's options are bound to. Returns an exit status if the command ends here
// (--help was asked for, and `usage` printed); throws ConfigError for what it does not understand.
std::optional<int> parse(CLI::App& app, const std::string& command, const std::string& usage,
                         const std::vector<std::string>& arguments);

// Checks for an option's values: one of these words; a whole number of a range; a number that is
// not negative.
CLI::Validator one_of(std::vector<std::string> words);
CLI::Validator whole_number(int64_t least, int64_t most);
CLI::Validator not_negative();

}  // namespace lockstep::cli
