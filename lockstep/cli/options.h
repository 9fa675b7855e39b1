// Reading a command's options.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

// Fills what the app's options are bound to. Returns an exit status if the command ends here
// (--help was asked for, and `usage` printed); throws ConfigError for what it does not understand.
std::optional<int> parse(CLI::App& app, const std::string& command, const std::string& usage,
                         const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
