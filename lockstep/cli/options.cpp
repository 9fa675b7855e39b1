#include "lockstep/cli/options.h"

#include <iostream>

#include "lockstep/core/error.h"

namespace lockstep::cli {

std::optional<int> parse(CLI::App& app, const std::string& command, const std::string& usage,
                         const std::vector<std::string>& arguments) {
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(),
                                       arguments.rend()));  // CLI11 takes them from the back
  } catch (const CLI::CallForHelp&) {
    std::cout << usage << CLI::Formatter().make_groups(&app, CLI::AppFormatMode::Normal);
    return 0;
  } catch (const CLI::ConversionError& failure) {
    throw ConfigError(command + ": " + failure.what() + "; it must be a whole number");
  } catch (const CLI::ParseError& failure) {
    throw ConfigError(command + ": " + failure.what());
  }
  return std::nullopt;
}

}  // namespace lockstep::cli
